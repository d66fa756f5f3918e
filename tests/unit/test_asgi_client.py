"""Requests to an application in this process."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from hotshoe.entrypoints.asgi_client import AsgiClient
from hotshoe.http_client import Answer


def ask(app: Any, body: Any = None) -> Answer:
    return asyncio.run(AsgiClient(app).request("POST", "/v1/x", body))


def test_the_application_gets_the_request_and_its_whole_answer_comes_back() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert (scope["method"], scope["path"]) == ("POST", "/v1/x")
        assert dict(scope["headers"])[b"content-length"] == b"8"
        assert not message["more_body"]
        headers = [(b"X-Request-Id", b"r1")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"got ", "more_body": True})
        await send({"type": "http.response.body", "body": message["body"]})

    answer = ask(app, {"a": 1})
    assert answer == Answer(201, {"x-request-id": "r1"}, b'got {"a": 1}')


def test_the_client_never_leaves_by_itself() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait([leaving], timeout=0.05)
        assert not leaving.done()
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert ask(app).status == 200


def test_an_application_that_fails_is_a_500_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug")

    with caplog.at_level(logging.ERROR):
        assert ask(app).status == 500
    assert "POST /v1/x failed" in caplog.text
    assert "a bug" in caplog.text
