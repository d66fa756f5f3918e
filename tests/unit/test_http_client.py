"""The HTTP client of the tools, against servers that answer byte by byte as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from hotshoe.errors import ConfigError
from hotshoe.http_client import Answer, HttpClient

JSON_OK = b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\nX-Request-Id: r1\r\n\r\n{"a": 12}'


class Scripted:
    """Answers the requests of each connection with prepared bytes; an empty answer closes."""

    def __init__(self, *connections: Sequence[Sequence[bytes]]) -> None:
        self._connections = list(connections)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.handlers: list[asyncio.Task[None]] = []
        self.url = ""

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._connections[self.num_connections]
        self.num_connections += 1
        for answer in script:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.requests.append(head + await reader.readexactly(length))
            for part in answer:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.002)  # so that parts come as parts
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def running(server: Scripted) -> AsyncIterator[HttpClient]:
    listener = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    async with listener:
        try:
            async with HttpClient(server.url + "/v1/", api_key="secret") as client:
                yield client
        finally:
            await asyncio.gather(*server.handlers)


def ask(server: Scripted, count: int = 1) -> list[Answer]:
    async def main() -> list[Answer]:
        async with running(server) as client:
            return [await client.request("POST", "/v1/x", {"text": "ü"}) for _ in range(count)]

    return asyncio.run(main())


def events(server: Scripted) -> list[bytes]:
    async def main() -> list[bytes]:
        async with running(server) as client, client.stream("POST", "/s", {}) as response:
            return [data async for data in response.events()]

    return asyncio.run(main())


def test_a_request_has_its_headers_and_body_and_the_answer_its_parts() -> None:
    server = Scripted([[JSON_OK]])
    (answer,) = ask(server)
    assert (answer.status, answer.json()) == (200, {"a": 12})
    assert answer.headers["x-request-id"] == "r1"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\nhost: " + server.url[7:].encode())
    assert b"\r\nauthorization: Bearer secret\r\n" in head
    assert body == b'{"text": "\\u00fc"}'


def test_connections_are_used_again_and_replaced_when_the_server_has_closed_them() -> None:
    server = Scripted([[JSON_OK], [JSON_OK]], [[JSON_OK], []])
    assert [answer.status for answer in ask(server, 3)] == [200] * 3
    assert server.num_connections == 2


def test_events_are_whole_however_the_bytes_are_cut() -> None:
    stream = b'data: {"a": 1}\n\ndata:x\ndata: y\n\n: comment\n\ndata: [DONE]\n\ndata: cut'
    chunks = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    parts = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    parts += [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    expected = [b'{"a": 1}', b"x\ny", b"[DONE]"]
    assert events(Scripted([[*parts, b"0\r\n\r\n"]])) == expected
    assert events(Scripted([[b"".join(parts) + b"0\r\n\r\n"]])) == expected


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    (answer,) = ask(Scripted([[b"HTTP/1.0 404 No\r\n\r\n", b'{"error":', b'{"message": "gone"}}']]))
    assert (answer.status, answer.error_message) == (404, "gone")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "closed without a response"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"], "closed in mid-response"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"], "in mid-response"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "no HTTP"),
        ([b"SSH-2.0-x\r\n\r\n"], "the response is no HTTP"),
        ([b"HTTP/1.1 ok\r\n\r\n"], "the response is no HTTP"),
    ],
)
def test_what_is_no_whole_response_is_an_error_of_the_connection(
    parts: list[bytes], message: str
) -> None:
    with pytest.raises(ConnectionError, match=message):
        ask(Scripted([parts]))


def test_leaving_a_stream_early_closes_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server = Scripted([[head + b"9\r\ndata: 1\n\n\r\n", JSON_OK]], [[JSON_OK]])

    async def main() -> None:
        async with running(server) as client:
            async with client.stream("POST", "/s", {}) as response:
                async for data in response.events():
                    assert data == b"1"
                    break
            assert (await client.request("GET", "/next")).status == 200

    asyncio.run(main())
    assert server.num_connections == 2


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: http://host:port or https://host:port"):
        HttpClient(url)
