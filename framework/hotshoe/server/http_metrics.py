"""Counts HTTP exchanges by endpoint and status, and reports them to the engine core."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from hotshoe.errors import HotshoeError
from hotshoe.metrics.http import HttpCounts

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hotshoe.entrypoints.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

REPORT_DELAY_S = 1.0
UNROUTED = "none"
"""Stands for the endpoint of exchanges that reached none: unknown paths, refused keys."""

UNCOUNTED = frozenset(
    {"/metrics", "/health", "/ready", "/ping", "/load", "/live", "/version", "/server_info"}
)
"""Asked all the time by machines; they would drown the rest."""


class HttpMetrics:
    """An ASGI middleware, the outermost one.

    What is counted goes to the core at most once per ``REPORT_DELAY_S``, so that a scrape of any
    API server process shows the exchanges of all of them.

    Args:
        app: the application.
        llm: takes the reports.
    """

    def __init__(self, app: ASGIApp, llm: AsyncLLM) -> None:
        self._app = app
        self._llm = llm
        self._counts = HttpCounts()
        self._reporting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        started = monotonic()

        async def remember(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, remember)
        finally:
            handler = getattr(scope.get("route"), "path", None) or UNROUTED
            if handler not in UNCOUNTED:
                self._counts.observe(_method(scope), handler, status, monotonic() - started)
                self._report_soon()

    def _report_soon(self) -> None:
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        await asyncio.sleep(REPORT_DELAY_S)
        try:
            await self._counts.report(self._llm.call)
        except HotshoeError as error:
            logger.debug("HTTP counts were not reported: %s", error)


def _method(scope: Scope) -> str:
    """The method, if it is one: clients may send any word."""
    known = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
    return scope["method"] if scope["method"] in known else "other"
