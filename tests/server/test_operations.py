"""Probes, keys, limits and what else an operator sets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotshoe.config.schema import ServerConfig
from hotshoe.errors import ConfigError
from hotshoe.server.gate import read_keys
from server.command import RunningServer, start_server
from server.conftest import LIMITS, wait_until_idle
from server.events import data_of

COMPLETIONS = "/v1/completions"
KEY = {"authorization": "Bearer second"}
ONE_TOKEN = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys, tight limits, warnings and clients' templates."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# for the tests\nsecond\n\n  third  \nclé-là\n", "utf-8")
    flags = {
        "api-keys": "first",
        "api-key-file": str(keys),
        "max-body-mb": "0.01",
        "max-queue": "4",
        "unknown-fields": "warn",
        "request-timeout-s": "3",
        "cors-origins": "https://page.example",
        "client-chat-templates": "true",
    }
    arguments = [part for name, value in flags.items() for part in (f"--server.{name}", value)]
    with start_server(str(tiny_path), *LIMITS[:2], "--max-num-seqs", "2", *arguments) as one:
        yield one


@pytest.fixture(scope="module")
def guarded(strict: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=strict.url, timeout=60) as client:
        yield client


def code_of(response: httpx.Response) -> Any:
    return response.json()["error"]["code"]


def test_probes_tell_that_the_server_lives(http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert http.get(path).status_code == 200
        assert http.head(path).status_code == 200
    assert set(http.get("/version").json()) == {"version"}
    assert http.get("/load").json()["num_running"] == 0
    assert "hotshoe:" in http.get("/metrics").text


def test_server_info_tells_what_runs_but_no_secrets(
    http: httpx.Client, guarded: httpx.Client
) -> None:
    info = http.get("/server_info").json()
    assert info["components"]["scheduler"].startswith("fcfs")
    assert info["engine"]["max_model_len"] == 256
    assert guarded.get("/server_info", headers=KEY).json()["config"]["server"]["api_keys"] == [
        "***"
    ]


def test_development_endpoints_exist_only_if_wanted(
    http: httpx.Client, guarded: httpx.Client
) -> None:
    assert http.post("/reset_prefix_cache").json() == {"was_reset": True}
    assert guarded.post("/reset_prefix_cache", headers=KEY).status_code == 404


@pytest.mark.parametrize("key", ["first", "second", "third", "clé-là"])
def test_any_of_the_keys_opens(guarded: httpx.Client, key: str) -> None:
    headers = {"authorization": f"Bearer {key}".encode()}
    assert guarded.post(COMPLETIONS, json=ONE_TOKEN, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"authorization": "Bearer # for the tests"},
    ],
)
def test_anything_else_does_not(guarded: httpx.Client, headers: dict[str, str]) -> None:
    response = guarded.post(COMPLETIONS, json=ONE_TOKEN, headers=headers)
    assert response.status_code == 401
    assert code_of(response) == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/metrics", "/server_info", "/v1/models", "/openapi.json", "/nothing"):
        assert guarded.get(path, headers=headers).status_code == 401
    for path in ("/health", "/ready", "/ping"):
        assert guarded.get(path, headers=headers).status_code == 200


def test_a_key_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no keys"):
        read_keys(ServerConfig(api_key_file=str(empty)))
    with pytest.raises(ConfigError, match="can't read"):
        read_keys(ServerConfig(api_key_file=str(tmp_path / "missing")))


def test_a_large_body_is_refused_whether_announced_or_not(guarded: httpx.Client) -> None:
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    headers = {**KEY, "content-type": "application/json"}
    announced = guarded.post(COMPLETIONS, content=body, headers=headers)
    chunked = guarded.post(COMPLETIONS, content=iter([body[:9000], body[9000:]]), headers=headers)
    for response in (announced, chunked):
        assert response.status_code == 413
        assert code_of(response) == "request_too_large"


def test_unknown_fields_are_warned_about(guarded: httpx.Client) -> None:
    odd = "naïve\r\nx: y"
    body = {**ONE_TOKEN, "tempratur": 1, odd: 2}
    response = guarded.post(COMPLETIONS, json=body, headers=KEY)
    assert response.status_code == 200
    assert "tempratur" in response.headers["warning"]
    assert "x" not in response.headers
    plain = guarded.post(COMPLETIONS, json=ONE_TOKEN, headers=KEY)
    assert "warning" not in plain.headers


def test_request_ids_come_back(http: httpx.Client) -> None:
    own = http.get("/health", headers={"x-request-id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    long = http.get("/health", headers={"x-request-id": "a" * 500})
    assert len(long.headers["x-request-id"]) < 100


def test_a_client_s_template_is_used_where_that_is_allowed(guarded: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    template = "{% for m in messages %}[{{ m.content }}{{ mark }}]{% endfor %}"
    more = {"chat_template": template, "chat_template_kwargs": {"mark": "!"}}
    tokens = guarded.post("/tokenize", json={**body, **more}, headers=KEY).json()["tokens"]
    assert bytes(tokens) == b"[hi!]"
    for bad in ("{{ 1 / 0 }}", "{{ x.y.z }}", "{% if %}", "{{ ''.__class__.__mro__ }}{{ 1 + '' }}"):
        body["chat_template"] = bad
        assert guarded.post("/tokenize", json=body, headers=KEY).status_code == 400


def test_browsers_of_listed_origins_may_call(http: httpx.Client, guarded: httpx.Client) -> None:
    asked = {"access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    preflight = guarded.options(COMPLETIONS, headers={**asked, "origin": "https://page.example"})
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    other = guarded.options(COMPLETIONS, headers={**asked, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    off = http.post(COMPLETIONS, json=ONE_TOKEN, headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in off.headers


def test_a_full_queue_says_when_to_come_back(guarded: httpx.Client) -> None:
    def ask(_: int) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        return guarded.post(COMPLETIONS, json=body, headers=KEY)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    refused = [one for one in answers if one.status_code == 429]
    assert refused
    assert {one.status_code for one in answers} <= {200, 429, 504}
    assert code_of(refused[0]) == "queue_full"
    assert refused[0].headers["retry-after"] == "1"
    with httpx.Client(base_url=guarded.base_url, headers=KEY) as client:
        wait_until_idle(client)
    many = {"prompt": ["x"] * 5, "max_tokens": 1}
    assert guarded.post(COMPLETIONS, json=many, headers=KEY).status_code == 400


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False
    assert {"temperature", "prompt_logprobs", "stream_options"} <= set(schema["properties"])


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_no_prompts_and_outputs_unless_wanted(
    tiny_path: Path, capfd: pytest.CaptureFixture[str], log_prompts: bool
) -> None:
    flags = [*LIMITS, "--log-level", "debug", *(["--server.log-prompts"] * log_prompts)]
    messages = [{"role": "user", "content": "SECRET"}]
    with (
        start_server(str(tiny_path), *flags) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        for body in ({}, {"stream": True}, {"temperature": -1}, {"max_tokens": 1000}):
            more = {"allowed_token_ids": [65], "max_tokens": 7, "ignore_eos": True, **body}
            prompt = {"prompt": "SECRET", **more}
            client.post(COMPLETIONS, json=prompt)
            client.post("/v1/chat/completions", json={"messages": messages, **more})
        client.post("/tokenize", json={"prompt": "SECRET"})
    log = capfd.readouterr().err
    assert ("SECRET" in log) is log_prompts
    assert ("A" * 7 in log) is log_prompts
    assert COMPLETIONS in log


def test_time_is_up_for_streams_too(tiny_path: Path) -> None:
    # the choices come one after the other, which takes a multiple of the time
    flags = [*LIMITS[:2], "--max-num-seqs", "1", "--server.request-timeout-s", "1"]
    with (
        start_server(str(tiny_path), *flags) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        body = {"prompt": "x", "max_tokens": 250, "n": 100, "ignore_eos": True}
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == 504
        assert code_of(response) == "timeout"
        assert response.headers["x-should-retry"] == "false"
        with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as streamed:
            if streamed.status_code == 200:
                last = list(data_of(streamed))[-2:]
                assert json.loads(last[0])["error"]["code"] == "timeout"
                assert last[1] == "[DONE]"
            else:
                assert streamed.status_code == 504
        wait_until_idle(client)


@pytest.mark.parametrize("start", ["GET /", "GET / HTTP/1.1\r\nx: ", "GET / HTTP/1.1\r\n"])
def test_a_head_without_an_end_is_cut_off(http: httpx.Client, start: str) -> None:
    more = b"a" * 32768 if not start.endswith("\r\n") else b"name: value\r\n" * 4096
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), 30) as client:
        client.sendall(start.encode())
        with suppress(ConnectionError):
            for _ in range(2000):
                client.sendall(more)
            raise AssertionError("it took 64 MiB of headers")
    assert http.get("/health").status_code == 200


def test_headers_of_some_length_are_taken(http: httpx.Client) -> None:
    assert http.get("/health", headers={"cookie": "a" * 30_000}).status_code == 200
