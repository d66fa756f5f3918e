"""A client that goes away takes its requests along, all choices of all prompts."""

from __future__ import annotations

import asyncio
import json
import socket
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from server.command import RunningServer
from server.conftest import wait_until_idle

LONG = {"max_tokens": 240, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x", **LONG}),
    "choices": ("/v1/completions", {"prompt": "x", "n": 8, **LONG}),
    "prompts": ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 4, **LONG}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "n": 4, "ignore_eos": True},
    ),
    "response": ("/v1/responses", {"input": "x", "temperature": 0}),
}


def send_and_leave(server: RunningServer, path: str, body: dict[str, Any]) -> bool:
    """Send a request and cut the connection once it runs; whether it was still running then."""
    url = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with (
        httpx.Client(base_url=server.url) as http,
        socket.create_connection((url.hostname, url.port)) as connection,
    ):
        received = b""
        end = b"0\r\n\r\n" if body["stream"] else b"\r\n\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        deadline = monotonic() + 20
        while not http.get("/load").json()["num_running"]:
            connection.setblocking(False)
            try:
                received += connection.recv(65536)
                if end in received:
                    return False
            except BlockingIOError:
                pass
            assert monotonic() < deadline
            sleep(0.001)
        return True


def total(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", list(REQUESTS))
def test_its_blocks_come_back(
    server: RunningServer, http: httpx.Client, kind: str, streamed: bool
) -> None:
    path, body = REQUESTS[kind]
    wait_until_idle(http)
    # a fast machine, or one where clients have to wait, may be done before the client has left
    for _ in range(5 if kind == "response" else 50):
        before = total(http, "hotshoe:generation_tokens_total")
        was_running = send_and_leave(server, path, {**body, "stream": streamed})
        wait_until_idle(http)
        num_tokens = total(http, "hotshoe:generation_tokens_total") - before
        whole = body.get("n", 1) * 240 * (3 if kind == "prompts" else 1)
        if was_running and num_tokens < whole * 0.9:
            return
    assert kind == "response", "no request was cut short"  # that one may end by itself


def test_many_leave_at_random_and_the_others_get_their_whole_text(
    server: RunningServer, http: httpx.Client
) -> None:
    body = {"temperature": 0, "max_tokens": 30, "stream": True}

    async def ask(client: httpx.AsyncClient, number: int) -> str | None:
        text = ""
        prompt = f"client {number % 7}"
        async with client.stream("POST", "/v1/completions", json={**body, "prompt": prompt}) as one:
            assert one.status_code == 200
            num_lines = 0
            async for line in one.aiter_lines():
                num_lines += 1
                if number % 5 == 0 and num_lines > number % 11:
                    return None
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def run() -> list[str | None]:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*[ask(client, number) for number in range(60)])

    texts = asyncio.run(run())
    for number, text in enumerate(texts):
        if text is not None:
            whole = http.post(
                "/v1/completions",
                json={**body, "stream": False, "prompt": f"client {number % 7}"},
            )
            assert whole.json()["choices"][0]["text"] == text
    wait_until_idle(http)
