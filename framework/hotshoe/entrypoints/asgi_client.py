"""Requests to an ASGI application in this process, without a server or a socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from hotshoe.http_client import Answer

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Application = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[Message]],
        Callable[[Message], Awaitable[None]],
    ],
    Awaitable[None],
]


class AsgiClient:
    """Calls an application as a server would for a client on this machine."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request, ``body`` as JSON unless None, and collect the whole response."""
        content = b"" if body is None else json.dumps(body).encode()
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        parts: list[bytes] = []
        start: Message = {}

        async def receive() -> Message:
            if messages:
                return messages.pop()
            # a client that doesn't leave: the next message would be its disconnection
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await self._app(_scope(method, path, len(content)), receive, send)
        except Exception:
            # a server would log it and go on; the application has answered 500 before it raised
            logger.exception("%s %s failed", method, path)
        if not start:
            return Answer(500, {}, b"")
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, b"".join(parts))


def _scope(method: str, path: str, length: int) -> dict[str, Any]:
    headers = {
        "host": "127.0.0.1",
        "content-type": "application/json",
        "content-length": str(length),
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
        "extensions": {},
    }
