"""Responses that take a while: event streams, and work that ends when its client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hotshoe.server.gate import exchange_of
from hotshoe.server.openai.errors import ApiError, client_gone, from_exception, timed_out

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encoder = msgspec.json.Encoder()


def encode(record: Any) -> bytes:
    """JSON on one line, whatever a client takes for the end of a line."""
    data = _encoder.encode(record)
    # readers that split text, not bytes, also split at U+2028, U+2029 and U+0085
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data


def event(record: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(record) + b"\n\n"


def json_response(record: Any) -> Response:
    """A plain response."""
    return Response(_encoder.encode(record), media_type="application/json")


def failed_event(error: ApiError) -> bytes:
    """What ends a stream in which something went wrong."""
    return event(error.body) + DONE


class EventStream(StreamingResponse):
    """Sends events until they end, the client is gone or time is up.

    Args:
        events: what to send; closed in any case.
        close: frees what the events come from; called in any case.
        timeout_s: how long they may take.
        failed: the events that tell of an error.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        timeout_s: float | None,
        failed: Callable[[ApiError], bytes] = failed_event,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events = events
        self._close = close
        self._timeout_s = timeout_s
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(scope, send))
        watcher = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stop(writer, watcher)
            await self._close()

    async def _write(self, scope: Scope, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start"} | start)
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            shown = _shown(error, exchange_of(scope).request_id, self._timeout_s)
            data = self._failed(shown)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(
    request: Request, work: Coroutine[Any, Any, Result], *, timeout_s: float | None
) -> Result:
    """The result of some work, which is cancelled when the client is gone or time is up.

    Raises:
        ApiError: if there is nobody to tell the result, or it took too long.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait(
            {worker, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if worker.done():
            return worker.result()
        if watcher.done():
            raise client_gone()
        assert timeout_s is not None
        raise timed_out(timeout_s)
    finally:
        await _stop(worker, watcher)


def _shown(error: Exception, request_id: str, timeout_s: float | None) -> ApiError:
    if isinstance(error, TimeoutError) and timeout_s is not None:
        return timed_out(timeout_s)
    return from_exception(error, request_id)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
