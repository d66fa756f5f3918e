"""``hotshoe serve``: one engine core, API servers on one port, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from hotshoe import __version__
from hotshoe.config import EngineConfig
from hotshoe.config.schema import ServerConfig
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.errors import ConfigError, EngineDeadError
from hotshoe.server.api_process import (
    DEATH_GRACE_S,
    ENGINE_DEAD_CODE,
    ApiServer,
    WorkerSettings,
)
from hotshoe.server.gate import read_keys
from hotshoe.server.launch import CoreHandle, start_core
from hotshoe.server.parsers import check_parsers
from hotshoe.tracing import check_tracing

logger = logging.getLogger(__name__)

MAX_DEATHS = 5
DEATHS_WITHIN_S = 30.0
"""When so many API servers end within so short a time, replacing them is no use."""

Say = Callable[[str], None]


def serve(config: EngineConfig, say: Say) -> int:
    """Serve until stopped.

    Args:
        config: the engine's and the server's.
        say: prints a line for the operator.

    Returns:
        The exit code: 0 after a stop by signal, 1 if the engine died.

    Raises:
        ConfigError: if the address can't be listened on, traces can't be sent, or a file of keys or
            of TLS, or an option of a parser, can't be used.
        PluginError: if a parser can't be loaded.
        EngineDeadError: if the engine doesn't come up, or the API servers end again and again.
    """
    check_tracing(config)
    check_tls(config.server)
    read_keys(config.server)
    check_parsers(config)
    listener = listen(config)
    handle = start_core(config)
    try:
        if config.server.workers == 1:
            return asyncio.run(_serve_here(config, handle, listener, say))
        return _Supervisor(config, handle, listener, say).run()
    finally:
        handle.stop()
        listener.close()


def check_tls(config: ServerConfig) -> None:
    """Make sure that the certificate and its key can be used.

    Raises:
        ConfigError: if they can't.
    """
    if config.tls_cert_file is None or config.tls_key_file is None:
        return
    try:
        # no password is asked for: nobody may be there
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_cert_file, config.tls_key_file, password=""
        )
    except OSError as error:
        raise ConfigError(
            f"server.tls_cert_file {config.tls_cert_file!r} and server.tls_key_file "
            f"{config.tls_key_file!r} can't be used: {error}; allowed: a certificate chain and its "
            "key without a password, both PEM"
        ) from error


def listen(config: EngineConfig) -> socket.socket:
    """A socket on ``server.host`` and ``server.port``, so that a port in use is known before
    anything is loaded.

    Raises:
        ConfigError: if it is in use or not ours to take.
    """
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on server.host {host!r}, server.port {port}: {error.strerror}; "
            "choose another port (0 picks a free one), or stop what uses this one"
        ) from error
    listener.set_inheritable(True)
    return listener


def url_of(config: EngineConfig, listener: socket.socket) -> str:
    """Where clients find the server."""
    scheme = "https" if config.server.tls_cert_file else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _announce(config: EngineConfig, llm_components: dict[str, str], url: str, say: Say) -> None:
    names = ", ".join(config.server.served_model_name or (config.model.path,))
    say(f"hotshoe {__version__} serves {names} at {url}")
    for section, component in llm_components.items():
        say(f"  {section}: {component}")


async def _serve_here(
    config: EngineConfig, handle: CoreHandle, listener: socket.socket, say: Say
) -> int:
    loop = asyncio.get_running_loop()
    starting = asyncio.create_task(AsyncLLM.connect(config, handle.settings, handle=handle))
    for number in (signal.SIGTERM, signal.SIGINT):
        # until there is something to drain, a signal just ends the start
        loop.add_signal_handler(number, starting.cancel)
    try:
        llm = await starting
    except asyncio.CancelledError:
        return 0
    async with llm:
        url = url_of(config, listener)
        server = ApiServer(llm, config, listener)
        return await server.run(lambda: _announce(config, llm.facts.components, url, say))


class _Supervisor:
    """Several API server processes; one that dies is replaced, the engine's death ends all."""

    def __init__(
        self, config: EngineConfig, handle: CoreHandle, listener: socket.socket, say: Say
    ) -> None:
        self._config = config
        self._handle = handle
        self._listener = listener
        self._say = say
        self._workers: list[subprocess.Popen[bytes]] = []
        self._num_signals = 0
        self._num_passed: dict[int, int] = {}
        self._deaths: list[float] = []
        self._ready_fd, self._tell_ready_fd = os.pipe()

    def run(self) -> int:
        """Supervise; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        facts = asyncio.run(self._wait_for_core())
        if facts is None:
            return 0
        self._workers = [self._start() for _ in range(self._config.server.workers)]
        self._wait_for_workers()
        if not self._num_signals:
            _announce(self._config, facts, url_of(self._config, self._listener), self._say)
        try:
            return self._watch()
        finally:
            self._end_workers()

    def _wait_for_workers(self) -> None:
        """Until each has said that it answers; or one has ended, which ``_watch`` will see."""
        num_ready = 0
        while num_ready < len(self._workers) and not self._num_signals and self._handle.is_alive:
            readable, _, _ = select.select([self._ready_fd], [], [], 0.1)
            if readable:
                num_ready += len(os.read(self._ready_fd, 64))
            if any(one.poll() is not None for one in self._workers):
                return

    def _watch(self) -> int:
        while True:
            time.sleep(0.1)
            self._pass_on_signals()
            codes = [one.poll() for one in self._workers]
            if ENGINE_DEAD_CODE in codes:
                return 1  # it may look alive from here: a process that hangs does
            if self._num_signals and None not in codes:
                return 0
            if not self._handle.is_alive:
                code = self._handle.process.returncode
                logger.error("the engine core ended with code %s", code)
                time.sleep(DEATH_GRACE_S)
                return 1
            if not self._num_signals:
                self._workers = [self._kept(one) for one in self._workers]

    def _kept(self, worker: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        if worker.poll() is None:
            return worker
        now = time.monotonic()
        self._deaths = [one for one in self._deaths if now - one < DEATHS_WITHIN_S] + [now]
        if len(self._deaths) > MAX_DEATHS:
            raise EngineDeadError(
                f"{len(self._deaths)} API servers ended within {DEATHS_WITHIN_S:g} s; "
                "their messages above say why"
            )
        logger.error(
            "API server %d ended with code %s; starting another", worker.pid, worker.returncode
        )
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        inherited = (self._listener.fileno(), self._tell_ready_fd)
        settings = WorkerSettings(
            core=self._handle.settings, socket_fd=inherited[0], ready_fd=inherited[1]
        )
        worker = subprocess.Popen(
            [sys.executable, "-m", "hotshoe.server.api_process"],
            stdin=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,  # it gets its signals from here, and each only once
        )
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(settings) + b"\n")
        worker.stdin.flush()
        return worker

    async def _wait_for_core(self) -> dict[str, str] | None:
        llm_starting = asyncio.create_task(
            AsyncLLM.connect(self._config, self._handle.settings, handle=self._handle)
        )
        while not llm_starting.done():
            await asyncio.sleep(0.05)
            if self._num_signals:
                llm_starting.cancel()
                return None
        llm = llm_starting.result()
        components = llm.facts.components
        await llm.disconnect()
        return components

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1

    def _pass_on_signals(self) -> None:
        """Send each worker as many signals as came; here, since one may come while it starts."""
        for worker in self._workers:
            num_passed = self._num_passed.get(worker.pid, 0)
            if worker.poll() is None and num_passed < self._num_signals:
                self._num_passed[worker.pid] = num_passed + 1
                worker.send_signal(signal.SIGTERM)

    def _end_workers(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.terminate()
        deadline = time.monotonic() + 2
        for worker in self._workers:
            try:
                worker.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
