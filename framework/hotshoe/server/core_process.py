"""The engine core's process: an input thread, the step loop, an output thread.

Started by ``hotshoe.server.launch`` as ``python -m hotshoe.server.core_process``, with a
``CoreSettings`` record as one JSON line on standard input. The pipe stays open: when it closes, the
parent is gone, however it died, and this process ends too.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from hotshoe.errors import (
    ConfigError,
    HotshoeError,
    RequestError,
    SamplingParamsError,
    SchedulerError,
)
from hotshoe.server.messages import (
    HEARTBEAT_INTERVAL_S,
    KEEP_ALIVE_TIMEOUT_S,
    AbortRequests,
    Accepted,
    AddRequests,
    Call,
    Fatal,
    FromCore,
    Goodbye,
    Heartbeat,
    Hello,
    Plugin,
    Refused,
    Reply,
    ToCore,
    Updates,
    Welcome,
    decode_to_core,
    encode,
)

if TYPE_CHECKING:
    from hotshoe.engine.assemble import Engine
    from hotshoe.metrics import EngineMetrics

logger = logging.getLogger(__name__)


class CoreSettings(msgspec.Struct, frozen=True):
    """What the parent tells the core.

    Attributes:
        config: the resolved ``EngineConfig`` as JSON.
        input_address: where the core listens.
        output_address: where it sends from.
        key: what every message must carry.
    """

    config: dict[str, Any]
    input_address: str
    output_address: str
    key: str


class CoreSockets:
    """The core's two sockets, taken before the model is loaded: an address in use is known at once.

    Raises:
        ConfigError: if one can't be listened on.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self._context = zmq.Context()
        self.input = self._bind(settings.input_address, max_waiting=0)
        # nobody has anything to say to it, and what isn't read must not pile up
        self.output = self._bind(settings.output_address, max_waiting=1, max_bytes=1024)

    def _bind(self, address: str, *, max_waiting: int, max_bytes: int = -1) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, max_waiting)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the engine core can't listen on {address!r}: {error.strerror}; change "
                "server.core_address, or stop what uses that port or the next one"
            ) from error
        return socket


class CoreServer:
    """An engine behind two sockets. One per process.

    Three threads: input (sockets to inbox), this one (inbox, steps, outbox), output (outbox to
    sockets, heartbeats). ZeroMQ sockets belong to one thread each.
    """

    def __init__(
        self, engine: Engine, metrics: EngineMetrics, sockets: CoreSockets, key: str
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._key = key.encode()
        self._max_queue = engine.config.server.max_queue
        self._inbox: queue.SimpleQueue[tuple[bytes, ToCore]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[bytes | None, FromCore]] = queue.SimpleQueue()
        self._owners: dict[str, bytes] = {}
        self._clients: dict[bytes, float] = {}  # when each was last heard of
        self._next_check = monotonic()
        self._is_draining = False
        self._step_started: float | None = None
        self._num_garbage = 0
        self._input, self._output = sockets.input, sockets.output
        for target, name in ((self._receive, "input"), (self._send, "output")):
            threading.Thread(target=target, name=f"hotshoe-{name}", daemon=True).start()

    # -- the step loop ---------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the process is told to stop.

        Raises:
            HotshoeError: if the engine can't go on.
        """
        core = self._engine.core
        while True:
            self._take_messages(is_waiting=not core.has_work)
            self._forget_the_silent()
            if not core.has_work:
                continue
            core.wait(0.05)
            self._step_started = monotonic()
            try:
                updates = core.step()
            except SchedulerError as error:
                # the policy is broken for good or for now; who waits for it must hear of it
                logger.exception("the scheduler failed")
                self._fail_all(str(error))
                updates = core.take_updates()
            finally:
                self._step_started = None
            self._publish(updates)

    def _take_messages(self, *, is_waiting: bool) -> None:
        try:
            sender, message = self._inbox.get(block=is_waiting, timeout=1.0)
            while True:
                self._handle(sender, message)
                sender, message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _publish(self, updates: list[Any]) -> None:
        by_owner: dict[bytes, list[Any]] = {}
        for update in updates:
            owner = self._owners.get(update.request_id)
            if owner is None:
                continue
            if update.finish_reason is not None:
                del self._owners[update.request_id]
            by_owner.setdefault(owner, []).append(update)
        for owner, own in by_owner.items():
            self._outbox.put((owner, Updates(own)))

    def _fail_all(self, message: str) -> None:
        core = self._engine.core
        core.fail(list(core.requests), message)

    # -- messages ----------------------------------------------------------------------------

    def _handle(self, sender: bytes, message: ToCore) -> None:
        self._clients[sender] = monotonic()
        if isinstance(message, AddRequests):
            self._add(sender, message)
        elif isinstance(message, AbortRequests):
            own = [one for one in message.request_ids if self._owners.get(one) == sender]
            self._engine.core.abort(own, finish_reason=message.finish_reason)
        elif isinstance(message, Call):
            self._outbox.put((sender, self._call(message)))
        elif isinstance(message, Hello):
            self._outbox.put((sender, self._welcome()))
        elif isinstance(message, Goodbye):
            self._forget(sender)

    def _forget(self, client: bytes) -> None:
        self._clients.pop(client, None)
        own = [one for one, owner in self._owners.items() if owner == client]
        self._engine.core.abort(own)

    def _forget_the_silent(self) -> None:
        now = monotonic()
        if now < self._next_check:
            return
        self._next_check = now + 1.0
        for client, last_heard in list(self._clients.items()):
            if now - last_heard > KEEP_ALIVE_TIMEOUT_S:
                logger.warning(
                    "a client has been silent for %g s; its requests end", now - last_heard
                )
                self._forget(client)

    def _add(self, sender: bytes, message: AddRequests) -> None:
        ids = [one.request_id for one in message.requests]
        added: list[str] = []
        seeds: list[int] = []
        try:
            if self._is_draining:
                raise _NotNow("draining", "the server is shutting down and takes no new requests")
            num_waiting = len(self._engine.core.planner.waiting)
            if num_waiting + len(ids) > self._max_queue:
                raise _NotNow(
                    "queue_full",
                    f"{num_waiting} requests are waiting and server.max_queue is {self._max_queue}",
                )
            for request in message.requests:
                if seeds and request.seed is None:
                    # choices are told apart by their index: one seed gives them all again
                    request = msgspec.structs.replace(request, seed=seeds[0])
                seeds.append(self._engine.core.add_request(request))
                added.append(request.request_id)
                self._owners[request.request_id] = sender
        except (RequestError, _NotNow) as error:
            for request_id in added:
                del self._owners[request_id]
            self._engine.core.abort(added)
            reason = error.reason if isinstance(error, _NotNow) else "bad_request"
            field = error.field if isinstance(error, SamplingParamsError) else None
            self._outbox.put((sender, Refused(ids, reason, str(error), field)))
        else:
            self._outbox.put((sender, Accepted(ids, seeds)))

    def _call(self, call: Call) -> Reply:
        methods: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._engine.core.reset_prefix_cache,
            "metrics": self._metrics.render,
            "load": self._metrics.load,
            "live": self._metrics.live,
            "count_http": self._metrics.count_http,
            "start_profile": self._metrics.start_profile,
            "stop_profile": self._metrics.stop_profile,
            "drain": self._drain,
        }
        method = methods.get(call.method)
        if method is None:
            return Reply(call.number, error=f"no call {call.method!r}; known: {sorted(methods)}")
        try:
            return Reply(call.number, method(*call.arguments))
        except HotshoeError as error:
            return Reply(call.number, error=str(error))
        except Exception as error:
            logger.exception("call %s failed", call.method)
            return Reply(call.number, error=str(error))

    def _drain(self) -> int:
        """Refuse new requests from now on; returns how many are alive."""
        self._is_draining = True
        return len(self._engine.core.requests)

    def _welcome(self) -> Welcome:
        engine = self._engine
        return Welcome(
            plugins=[
                Plugin(one.kind, one.name, one.distribution, one.version, one.contract)
                for one in engine.registry.fingerprint()
            ],
            components=engine.resolution.components(),
            vocab_size=engine.core.vocab_size,
            max_model_len=engine.facts.max_model_len,
            block_size=engine.core.kv_cache.block_size,
            num_blocks=engine.core.kv_cache.num_blocks,
            dtype=str(engine.facts.dtype).removeprefix("torch."),
            device=str(engine.facts.device),
            generation_config=dict(engine.generation_config),
            pid=os.getpid(),
        )

    # -- sockets -----------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            frames = self._input.recv_multipart()
            if len(frames) != 3 or frames[1] != self._key:
                self._drop(f"{len(frames)} frames, or a wrong key")
                continue
            try:
                message = decode_to_core(frames[2])
            except (msgspec.DecodeError, RequestError, RecursionError) as error:
                self._drop(str(error))
                continue
            self._inbox.put((frames[0], message))

    def _drop(self, why: str) -> None:
        self._num_garbage += 1
        if self._num_garbage & (self._num_garbage - 1) == 0:
            logger.warning("dropped %d messages that make no sense: %s", self._num_garbage, why)

    def _send(self) -> None:
        next_beat = monotonic()
        while True:
            timeout = max(next_beat - monotonic(), 0.0)
            try:
                owner, message = self._outbox.get(timeout=timeout)
            except queue.Empty:
                next_beat = monotonic() + HEARTBEAT_INTERVAL_S
                owner, message = None, self._heartbeat()
            data = encode(message)
            for client in list(self._clients) if owner is None else [owner]:
                self._output.send_multipart([client, data])
            if isinstance(message, Fatal):
                self._output.close(linger=500)
                return

    def _heartbeat(self) -> Heartbeat:
        planner = self._engine.core.planner
        started = self._step_started
        return Heartbeat(
            len(planner.running),
            len(planner.waiting),
            self._is_draining,
            monotonic() - started if started is not None else 0.0,
        )

    def announce_death(self, message: str) -> None:
        """Tell every client, and wait until it is sent."""
        self._outbox.put((None, Fatal(message)))
        for thread in threading.enumerate():
            if thread.name == "hotshoe-output":
                thread.join(timeout=2.0)


class _NotNow(Exception):
    """A request that could be served at another time."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def watch_parent() -> None:
    """End this process when standard input closes: the parent has ended, however."""

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="hotshoe-parent-watch", daemon=True).start()


def main() -> int:
    """Run the core; the exit code is 0 after a stop by signal, else 1 or 2."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreSettings)
    watch_parent()
    # Ctrl-C in a terminal reaches the whole group; the parent decides when the core stops
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from hotshoe.config import EngineConfig
    from hotshoe.engine.assemble import build_engine
    from hotshoe.log import configure_logging
    from hotshoe.metrics import EngineMetrics
    from hotshoe.metrics.status import StatusLine

    config = EngineConfig.model_validate(settings.config, strict=False)
    configure_logging(config, process="core")
    try:
        sockets = CoreSockets(settings)
        engine = build_engine(config)
    except HotshoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    metrics = EngineMetrics(engine)
    StatusLine(metrics).start(config.server.status_interval_s)
    server = CoreServer(engine, metrics, sockets, settings.key)
    # modules and weights stay: a full pass of the collector over them would hold up a step
    gc.collect()
    gc.freeze()
    try:
        server.run()
    except BaseException as error:
        logger.exception("the engine core died")
        server.announce_death(f"the engine core died: {error!r}")
    return 1


def socket_path(folder: Path, name: str) -> str:
    """Address of a local socket."""
    return f"ipc://{folder / name}"


def exit_with(run: Callable[[], int]) -> NoReturn:
    """End the process with a main function's code, without waiting for threads.

    Those that sit in ZeroMQ or in a read of standard input would hold up a normal exit.
    """
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_with(main)
