"""HTTP/1.1 on a connection: uvicorn's, with limits on what comes before a request's body."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65536
"""Longest request line and headers; with the rest of what the socket gave in one read."""

MAX_HEAD_S = 60.0
"""How long they may take to arrive, from the connection or the request's first byte."""


class LimitedHttp(HttpToolsProtocol):
    """Ends connections whose request line and headers have no end: nobody has shown a key yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        is_too_long = self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES
        if is_too_long and not self.transport.is_closing():
            self.send_400_response(f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = 0
        self._start_clock()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(MAX_HEAD_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
