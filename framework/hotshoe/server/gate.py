"""``Gate``: what every HTTP exchange goes through before any handler sees it. An ASGI middleware:
request ids, API keys, size limits, and an answer to whatever goes wrong.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotshoe.config.schema import ServerConfig
from hotshoe.errors import ConfigError
from hotshoe.server.openai.errors import ApiError, from_exception

OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/ping", "/ready"})
OPEN_PREFIX = "/assets/"
"""Probes and the page's files need no key; everything that tells or does something does."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = "hotshoe.exchange"


@dataclass(slots=True)
class Exchange:
    """One request and its response.

    Attributes:
        request_id: the client's ``X-Request-Id``, or one made here.
        headers: more headers of the response.
    """

    request_id: str
    headers: list[tuple[str, str]] = field(default_factory=list)


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that a handler works for."""
    found = scope[_KEY]
    assert isinstance(found, Exchange)
    return found


class Gate:
    """Wraps an application.

    Args:
        app: the application.
        config: keys and limits.

    Raises:
        ConfigError: if ``server.api_key_file`` has no keys.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in read_keys(config)]
        self._max_body = int(config.max_body_mb * 2**20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = scope[_KEY] = Exchange(_request_id(headers.get("x-request-id")))
        response = _Response(exchange, send)
        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), response.send)
        except Exception as error:
            shown = from_exception(error, exchange.request_id)
            if response.has_started:
                raise  # nothing can be said any more; the connection is cut
            await shown.response()(scope, receive, response.send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        if self._keys and not (path in OPEN_PATHS or path.startswith(OPEN_PREFIX)):
            self._check_key(headers.get("authorization", ""))
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _check_key(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        secret = given.strip(" \t").encode("latin-1")  # the bytes that came, whatever they mean
        # every key is compared, or the time would tell which one came close
        is_known = [hmac.compare_digest(secret, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(is_known):
            raise ApiError(
                401,
                "no valid API key; send one as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than server.max_body_mb allows, {self._max_body} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )


class _Response:
    """Sends, with the exchange's headers."""

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self.has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            exchange = self._exchange
            extra = [("x-request-id", exchange.request_id), *exchange.headers]
            headers: list[Any] = [*message.get("headers", ())]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in extra]
            message["headers"] = headers
        await self._send(message)


def read_keys(config: ServerConfig) -> Sequence[str]:
    """All keys that open the server; none: it is open.

    Raises:
        ConfigError: if a key file is named but has none, which would open it by mistake.
    """
    keys = list(config.api_keys)
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"server.api_key_file: can't read {config.api_key_file!r}: {error}"
            ) from error
        found = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        if not found:
            raise ConfigError(
                f"server.api_key_file: {config.api_key_file!r} has no keys; write one a line"
            )
        keys += found
    return keys


def _request_id(given: str | None) -> str:
    """The client's own, if it can't break a header or a log."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req_{uuid.uuid4().hex}"
