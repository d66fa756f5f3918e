"""A lean HTTP/1.1 client over asyncio: what the tools around the server talk to any server with.

A load generator shares the machine with what it measures, so a streamed chunk must cost little:
this one takes about a third of the processor time of a general client, and needs no dependency.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hotshoe import __version__
from hotshoe.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response.

    Attributes:
        headers: by lower-case name.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error_message(self) -> str:
        """The message of an error in OpenAI's shape, else the start of the body."""
        return error_message(self.json()) or self.body.decode(errors="replace").strip()[:200]


def error_message(body: Any) -> str | None:
    """The message of an error body in OpenAI's shape; None if it has another one."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


class HttpClient:
    """Sends requests to one server, many at a time; connections are kept and used again.

    Every failure of the network, and every response that is no HTTP, is an ``OSError``.
    Certificates are checked against those that the system or ``SSL_CERT_FILE`` trusts. Proxies are
    not used.

    Args:
        url: ``http://host:port`` or ``https://...``; a path, ``/v1`` included, may follow.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: if the URL is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url, self._host, self._port, self._base = _split(url)
        is_secure = self.url.startswith("https:")
        self._ssl = ssl.create_default_context() if is_secure else None
        lines = [f"host: {self.url.partition('://')[2]}", f"user-agent: hotshoe/{__version__}"]
        if api_key is not None:
            lines.append(f"authorization: Bearer {api_key}")
        self._fixed_headers = "\r\n".join(lines)
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request and read the whole response.

        Args:
            path: such as ``/v1/models``.
            body: sent as JSON unless None.
        """
        async with self.stream(method, path, body) as response:
            parts = [part async for part in response.parts()]
        return Answer(response.status, response.headers, b"".join(parts))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Any = None
    ) -> AsyncIterator[StreamedResponse]:
        """Send a request; the response's body can be read as it comes.

        Leaving the context before the end of the body closes the connection, which aborts the
        request.
        """
        message = self._message(method, path, body)
        connection, response = await self._exchange(message)
        try:
            yield response
        finally:
            if response.is_complete and response.keeps_connection:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def close(self) -> None:
        """Close the connections that are idle."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.writer.close()
        await asyncio.gather(
            *(connection.writer.wait_closed() for connection in idle), return_exceptions=True
        )
        # connections that were given up just before are closed in the loop's next turn
        await asyncio.sleep(0)

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _message(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {self._path(path)} HTTP/1.1", self._fixed_headers]
        lines.append(f"content-length: {len(content)}")
        if body is not None:
            lines.append("content-type: application/json")
        return "\r\n".join([*lines, "", ""]).encode() + content

    def _path(self, path: str) -> str:
        # a base URL may end with /v1, as those of OpenAI clients do
        base = self._base
        if base.endswith("/v1"):
            base = base.removesuffix("/v1")
        return base + path

    async def _exchange(self, message: bytes) -> tuple[_Connection, StreamedResponse]:
        """Send a message; on a fresh connection if the server has closed the kept one meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reader.at_eof() or connection.writer.is_closing():
                connection.writer.close()
                continue
            with suppress(ConnectionResetError, BrokenPipeError):
                return connection, await connection.exchange(message)
        streams = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        connection = _Connection(*streams)
        return connection, await connection.exchange(message)


@dataclass(slots=True)
class StreamedResponse:
    """A response whose body is still coming.

    Attributes:
        headers: by lower-case name.
        is_complete: whether the body has been read to its end.
    """

    status: int
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader
    is_complete: bool = field(default=False, init=False)

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow on the connection."""
        has_length = {"content-length", "transfer-encoding"} & self.headers.keys()
        return bool(has_length) and self.headers.get("connection", "").lower() != "close"

    async def parts(self) -> AsyncIterator[bytes]:
        """The body in the pieces in which it comes.

        Raises:
            OSError: if the connection is lost before its end.
        """
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                async for part in self._chunks():
                    yield part
            elif "content-length" in self.headers:
                yield await self._reader.readexactly(int(self.headers["content-length"]))
            else:
                while part := await self._reader.read(65536):
                    yield part
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was closed in mid-response") from error
        except ValueError as error:
            raise ConnectionError(f"the response is no HTTP: {error}") from error
        self.is_complete = True

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event. One that is cut off is not among them."""
        rest = b""
        async for part in self.parts():
            *blocks, rest = (rest + part.replace(b"\r\n", b"\n")).split(b"\n\n")
            for block in blocks:
                lines = [line for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    yield b"\n".join(line[5:].removeprefix(b" ") for line in lines)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await self._reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            data = await self._reader.readexactly(size + 2)
            if size == 0:
                return
            yield data[:-2]


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def exchange(self, message: bytes) -> StreamedResponse:
        """Send a request; returns when the head of the response has come. Closed if that fails."""
        try:
            return await self._exchange(message)
        except BaseException:
            self.writer.close()
            raise

    async def _exchange(self, message: bytes) -> StreamedResponse:
        self.writer.write(message)
        await self.writer.drain()
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            status_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            pairs = (line.partition(":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            version, status = status_line.split()[:2]
            if not version.startswith("HTTP/1."):
                raise ValueError(status_line[:80])
            return StreamedResponse(int(status), headers, self.reader)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was closed without a response") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionError(f"the response is no HTTP: {error}") from error


def _split(url: str) -> tuple[str, str, int, str]:
    """The URL without its path, its host, its port and its path."""
    allowed = "allowed: http://host:port or https://host:port"
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise ConfigError(f"--url: got {url!r}: {error}; {allowed}") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(f"--url: got {url!r}, {allowed}")
    return f"{parts.scheme}://{parts.netloc}", parts.hostname, port, parts.path.rstrip("/")
