"""One API server: the HTTP app over an ``AsyncLLM``, from its first request to the end of its
drain.

Runs in the command's own process, or, with several workers, in processes started by
``hotshoe.server.serve`` as ``python -m hotshoe.server.api_process`` with a ``WorkerSettings``
record as one JSON line on standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import msgspec
import uvicorn

from hotshoe.config import EngineConfig
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.errors import HotshoeError
from hotshoe.log import configure_logging
from hotshoe.server.app import close_app, create_app
from hotshoe.server.core_process import CoreSettings, exit_with, watch_parent
from hotshoe.server.http_protocol import LimitedHttp

logger = logging.getLogger(__name__)

DEATH_GRACE_S = 3.0
"""How long a server whose engine died goes on telling so, before it ends itself."""


ENGINE_DEAD_CODE = 3
"""A worker's exit code when the engine is dead or hangs: another worker wouldn't help."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """What the supervisor tells a worker.

    Attributes:
        core: how to reach the engine core.
        socket_fd: the listening socket, inherited.
        ready_fd: a pipe, inherited; a byte on it says that the worker answers.
    """

    core: CoreSettings
    socket_fd: int
    ready_fd: int


class ApiServer:
    """Serves HTTP until it is told to stop or its engine dies.

    The first SIGTERM or SIGINT drains: new requests are refused, running ones may finish within
    ``server.drain_timeout_s``. The second one stops at once.
    """

    def __init__(self, llm: AsyncLLM, config: EngineConfig, listener: socket.socket) -> None:
        self._llm = llm
        self._config = config
        self._listener = listener
        self._app = create_app(llm)
        self._server = _Uvicorn(_uvicorn_config(self._app, config))
        self._num_signals = 0
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[], object] | None = None) -> int:
        """Serve; returns the exit code: 0 after a stop, 1 if the engine died."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        watcher = asyncio.create_task(self._watch(on_ready))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watcher.cancel()
            await close_app(self._app)
        return 1 if self._llm.death is not None else 0

    def stop(self) -> None:
        """Drain; called again, stop at once."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._stopping = asyncio.create_task(self._drain())
        else:
            logger.warning("stopping at once")
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        limit = self._config.server.drain_timeout_s
        deadline = monotonic() + limit
        with contextlib.suppress(HotshoeError):
            num_alive = await self._llm.call("drain")
            logger.info("draining: %d requests may finish within %g s", num_alive, limit)
            while self._llm.num_unfinished and monotonic() < deadline:
                await asyncio.sleep(0.02)
        if self._llm.num_unfinished:
            logger.warning("%d requests did not finish in time", self._llm.num_unfinished)
        self._server.should_exit = True

    async def _watch(self, on_ready: Callable[[], object] | None) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        if on_ready is not None:
            on_ready()
        while self._llm.death is None:
            await asyncio.sleep(0.05)
        logger.error("%s; stopping in %g s", self._llm.death, DEATH_GRACE_S)
        await asyncio.sleep(DEATH_GRACE_S)
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: Any, config: EngineConfig) -> uvicorn.Config:
    server = config.server
    return uvicorn.Config(
        app,
        http=LimitedHttp,
        log_config=None,
        access_log=config.log_level == "debug",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
        ssl_certfile=server.tls_cert_file,
        ssl_keyfile=server.tls_key_file,
    )


async def _run_worker(settings: WorkerSettings) -> int:
    config = EngineConfig.model_validate(settings.core.config, strict=False)
    configure_logging(config, process=f"api-{os.getpid()}")
    listener = socket.socket(fileno=settings.socket_fd)
    async with await AsyncLLM.connect(config, settings.core) as llm:
        server = ApiServer(llm, config, listener)
        code = await server.run(lambda: os.write(settings.ready_fd, b"1"))
    return ENGINE_DEAD_CODE if code else 0


def main() -> int:
    """Run a worker process."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    watch_parent()
    try:
        return asyncio.run(_run_worker(settings))
    except HotshoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    exit_with(main)
