"""``AsyncLLM``: an engine core in another process, from asyncio. What the server is built on."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import zmq
import zmq.asyncio

from hotshoe.api import SamplingParams
from hotshoe.config import EngineConfig, ResolvedConfig, load_config
from hotshoe.engine.request import EngineRequest
from hotshoe.entrypoints.outputs import OutputProcessor, RequestOutput
from hotshoe.entrypoints.requests import (
    check_constraint,
    check_some_token_is_left,
    default_sampling_params,
    token_ids,
    with_bad_words,
)
from hotshoe.errors import (
    DrainingError,
    EngineDeadError,
    PluginError,
    QueueFullError,
    RequestError,
)
from hotshoe.plugins import PluginRegistry
from hotshoe.server.core_process import CoreSettings
from hotshoe.server.launch import CoreHandle, start_core
from hotshoe.server.messages import (
    HEARTBEAT_TIMEOUT_S,
    KEEP_ALIVE_INTERVAL_S,
    AbortRequests,
    Accepted,
    AddRequests,
    Call,
    Fatal,
    Goodbye,
    Heartbeat,
    Hello,
    KeepAlive,
    Plugin,
    Refused,
    Reply,
    ToCore,
    Updates,
    Welcome,
    decode_from_core,
    encode,
)
from hotshoe.text.chat import render_chat
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer
from hotshoe.weights.checkpoint import open_model

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class AsyncLLM:
    """The client of an engine core. Use ``await AsyncLLM.start(...)``, then ``generate``, then
    ``await close()``.

    Tokenizing and detokenizing happen here, so the step loop never waits for them. Many
    ``generate`` calls run at once; the engine batches them.

    Attributes:
        config: the engine's.
        facts: what the core said when it was ready: limits, plugins, defaults.
        tokenizer: the model's.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: CoreSettings,
        tokenizer: Tokenizer,
        handle: CoreHandle | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.facts: Welcome
        self._handle = handle
        self._key = settings.key.encode()
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._death: str | None = None
        self._last_heard = monotonic()
        self._heartbeat = Heartbeat(0, 0, False, 0.0)
        identity = uuid.uuid4().bytes
        self._context = zmq.asyncio.Context()
        self._to_core = _connect(self._context, settings.input_address, identity)
        self._from_core = _connect(self._context, settings.output_address, identity)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        model: str | Mapping[str, Any] | None = None,
        *,
        config: str | None = None,
        **arguments: Any,
    ) -> AsyncLLM:
        """Start an engine core and connect to it. Arguments as for ``LLM``; components by name
        only.

        Raises:
            HotshoeError: whatever stands in the way; the core's own words are on standard error.
        """
        if model is not None:
            arguments["model"] = model
        resolved = load_config(Path(config) if config else None, overrides=arguments)
        return await cls.from_config(resolved)

    @classmethod
    async def from_config(cls, resolved: ResolvedConfig) -> AsyncLLM:
        """Start a core for a config that is resolved already."""
        handle = start_core(resolved.config)
        try:
            return await cls.connect(resolved.config, handle.settings, handle=handle)
        except BaseException:
            handle.stop()
            raise

    @classmethod
    async def connect(
        cls, config: EngineConfig, settings: CoreSettings, *, handle: CoreHandle | None = None
    ) -> AsyncLLM:
        """Connect to a core that runs already or is starting.

        Args:
            config: the core's.
            settings: its addresses and key.
            handle: the process, if this client owns it: then its death is noticed at once, and
                ``close`` stops it.

        Raises:
            EngineDeadError: if it ends before it is ready.
            PluginError: if it loaded other plugins than those installed here.
        """
        with open_model(config.model) as checkpoint:
            tokenizer = load_tokenizer(
                checkpoint,
                tokenizer=config.model.tokenizer,
                chat_template=config.model.chat_template,
            )
        llm = cls(config, settings, tokenizer, handle)
        try:
            llm.facts = await llm._handshake()
            check_plugins(config, llm.facts.plugins)
        except BaseException:
            await llm.close()
            raise
        llm._tasks = [
            asyncio.create_task(llm._receive(), name="hotshoe-receive"),
            asyncio.create_task(llm._watch(), name="hotshoe-watch"),
        ]
        return llm

    # -- generating -----------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt; yields the same growing object whenever it has changed.

        ``output.outputs[i].text`` only grows; remember how much of it you have seen. Closing the
        generator, or cancelling the task that runs it, aborts the request. Arguments and errors
        are those of ``submit``.
        """
        stream = await self.submit(prompt, sampling_params, **kwargs)
        try:
            is_finished = False
            while not is_finished:
                # a fast engine may be done before it's asked, or while the caller is busy
                if not stream.output.finished:
                    await stream.changed.wait()
                stream.changed.clear()
                stream.check()
                is_finished = stream.output.finished
                yield stream.output
        finally:
            await stream.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        changed: asyncio.Event | None = None,
    ) -> RequestStream:
        """Queue a prompt; returns once the engine has taken it.

        Whoever calls this must ``close`` the stream, which aborts what is unfinished.

        Args:
            prompt: text or token ids.
            sampling_params: None = ``default_sampling_params()``.
            request_id: a name for logs; it need not be unique.
            priority: for schedulers that look at it; lower runs first.
            cache_salt: only requests with an equal salt share cached prefixes.
            metadata: free values for schedulers.
            changed: set whenever the output has changed; several streams may share one.

        Raises:
            RequestError: if it can't be served.
            QueueFullError: if too many requests wait already.
            DrainingError: if the engine is shutting down.
            EngineDeadError: if the engine dies.
        """
        params = with_bad_words(self.tokenizer, sampling_params or self.default_sampling_params())
        check_constraint(params)
        check_some_token_is_left(params, self.tokenizer.eos_token_ids)
        ids = token_ids(self.tokenizer, prompt)
        name = f"{request_id or 'request'}-{uuid.uuid4().hex[:12]}"
        requests = self._outputs.split(
            name,
            ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            metadata=dict(metadata or {}),
        )
        stream = _Stream(requests, changed or asyncio.Event())
        for request in requests:
            self._streams[request.request_id] = stream
        try:
            await self._send(AddRequests(requests))
            seeds = await stream.accepted
            text = prompt if isinstance(prompt, str) else None
            stream.output = self._outputs.start(name, text, requests, seeds)
            await self._apply(stream, stream.early)
        except BaseException:
            await self._end(stream)
            raise
        return RequestStream(self, stream, stream.output)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling defaults, with changes."""
        return default_sampling_params(self.facts.generation_config, **changes)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation."""
        return render_chat(self.tokenizer, messages, **kwargs)

    # -- watching and steering ------------------------------------------------------------

    async def call(self, method: str, *arguments: Any, timeout_s: float = 10.0) -> Any:
        """A control-plane call: ``reset_prefix_cache``, ``metrics``, ``load``, ``live``, ``drain``,
        ``start_profile``, ``stop_profile``.

        Raises:
            RequestError: if the core refused it, or didn't answer in time.
            EngineDeadError: if the core is dead.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            await self._send(Call(number, method, list(arguments)))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise RequestError(
                f"the engine didn't answer {method!r} within {timeout_s} s"
            ) from error
        finally:
            self._calls.pop(number, None)

    @property
    def death(self) -> str | None:
        """Why the core is dead; None while it lives."""
        return self._death

    @property
    def heartbeat(self) -> Heartbeat:
        """The core's latest sign of life."""
        return self._heartbeat

    @property
    def num_unfinished(self) -> int:
        """Engine requests of this client that have not ended."""
        return len(self._streams)

    async def close(self) -> None:
        """Abort what runs, disconnect, and stop the core if it is ours. Idempotent."""
        await self.disconnect()
        if self._handle is not None:
            await asyncio.to_thread(self._handle.stop)

    async def disconnect(self) -> None:
        """Abort what runs and leave the core running. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._die("the engine was closed")
        if not self._to_core.closed:
            await self._to_core.send_multipart([self._key, encode(Goodbye())])
            self._to_core.close(linger=200)
            self._from_core.close(linger=0)
            self._context.term()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- inside -----------------------------------------------------------------------------

    async def _handshake(self) -> Welcome:
        while True:
            await self._to_core.send_multipart([self._key, encode(Hello())])
            if await self._from_core.poll(200):
                message = decode_from_core((await self._from_core.recv_multipart())[-1])
                if isinstance(message, Welcome):
                    self._last_heard = monotonic()
                    return message
            if self._handle is not None and not self._handle.is_alive:
                code = self._handle.process.returncode
                raise EngineDeadError(
                    f"the engine core ended with code {code} before it was ready; "
                    "its messages above say why"
                )

    async def _send(self, message: ToCore) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        await self._to_core.send_multipart([self._key, encode(message)])

    async def _receive(self) -> None:
        while True:
            frames = await self._from_core.recv_multipart()
            self._last_heard = monotonic()
            message = decode_from_core(frames[-1])
            if isinstance(message, Updates):
                await self._take(message)
            elif isinstance(message, Heartbeat):
                self._heartbeat = message
            elif isinstance(message, Accepted):
                self._resolve(message.request_ids, message.seeds)
            elif isinstance(message, Refused):
                self._reject(message)
            elif isinstance(message, Reply):
                self._answer(message)
            elif isinstance(message, Fatal):
                self._die(message.message)

    async def _take(self, message: Updates) -> None:
        groups: dict[int, tuple[_Stream, list[Any]]] = {}
        for update in message.updates:
            stream = self._streams.get(update.request_id)
            if stream is not None:
                groups.setdefault(id(stream), (stream, []))[1].append(update)
        for stream, updates in groups.values():
            if stream.output is None:
                stream.early += updates
            else:
                await self._apply(stream, updates)

    async def _apply(self, stream: _Stream, updates: list[Any]) -> None:
        changed, stopped = self._outputs.process(updates)
        if stopped:
            await self._send(AbortRequests(stopped, "stop"))
        if changed:
            stream.event.set()

    def _resolve(self, request_ids: list[str], seeds: list[int]) -> None:
        stream = self._streams.get(request_ids[0])
        if stream is not None and not stream.accepted.done():
            stream.accepted.set_result(seeds)

    def _reject(self, message: Refused) -> None:
        stream = self._streams.get(message.request_ids[0])
        if stream is None or stream.accepted.done():
            return
        error: Exception
        if message.reason == "queue_full":
            error = QueueFullError(message.message)
        elif message.reason == "draining":
            error = DrainingError(message.message)
        else:
            error = RequestError(message.message, field=message.field)
        stream.accepted.set_exception(error)

    def _answer(self, message: Reply) -> None:
        future = self._calls.get(message.number)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(RequestError(message.error))
        else:
            future.set_result(message.result)

    async def _watch(self) -> None:
        next_sign = monotonic()
        while self._death is None:
            started = monotonic()
            await asyncio.sleep(0.1)
            if monotonic() - started > HEARTBEAT_TIMEOUT_S / 2:
                # this loop was held up, so beats that have arrived are not read yet
                self._last_heard = monotonic()
            if monotonic() >= next_sign:
                next_sign = monotonic() + KEEP_ALIVE_INTERVAL_S
                await self._to_core.send_multipart([self._key, encode(KeepAlive())])
            if self._handle is not None and not self._handle.is_alive:
                self._die(f"the engine core ended with code {self._handle.process.returncode}")
            elif not Path(f"/proc/{self.facts.pid}").exists():
                self._die("the engine core's process is gone")
            elif monotonic() - self._last_heard > HEARTBEAT_TIMEOUT_S:
                self._die(f"the engine core has been silent for {HEARTBEAT_TIMEOUT_S} s")

    def _die(self, why: str) -> None:
        if self._death is not None:
            return
        self._death = why
        error = EngineDeadError(why)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        for stream in self._streams.values():
            if not stream.accepted.done():
                stream.accepted.set_exception(error)
            stream.event.set()

    async def _end(self, stream: _Stream) -> None:
        if stream.is_ended:
            return
        stream.is_ended = True
        own = [request.request_id for request in stream.requests]
        for request_id in own:
            self._streams.pop(request_id, None)
        self._outputs.forget(own)
        if stream.accepted.done() and not stream.accepted.cancelled():
            stream.accepted.exception()
        is_over = stream.output is not None and stream.output.finished
        if not is_over and self._death is None:
            await self._to_core.send_multipart([self._key, encode(AbortRequests(own))])


class RequestStream:
    """A prompt that the engine has taken, from ``AsyncLLM.submit``.

    Attributes:
        output: grows while the engine works.
        changed: set whenever it has grown, and when the engine has died; the reader clears it.
    """

    def __init__(self, llm: AsyncLLM, stream: _Stream, output: RequestOutput) -> None:
        self._llm = llm
        self._stream = stream
        self.output = output
        self.changed = stream.event

    def check(self) -> None:
        """Make sure that more is to be expected.

        Raises:
            EngineDeadError: if the output is unfinished and the engine is dead.
        """
        if self._llm.death is not None and not self.output.finished:
            raise EngineDeadError(self._llm.death)

    async def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        await self._llm._end(self._stream)


class _Stream:
    """One prompt on its way: whether it was accepted, its output, and whether that has changed."""

    def __init__(self, requests: list[EngineRequest], event: asyncio.Event) -> None:
        self.requests = requests
        self.accepted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self.output: RequestOutput | None = None
        self.early: list[Any] = []
        self.event = event
        self.is_ended = False


def _connect(context: zmq.asyncio.Context, address: str, identity: bytes) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def check_plugins(config: EngineConfig, expected: Sequence[Plugin]) -> None:
    """Check that this process sees the distribution and version of every plugin that the core uses.

    Raises:
        PluginError: lists every difference.
    """
    plugins = config.plugins
    registry = PluginRegistry(plugins.allow, plugins.deny, safe_mode=plugins.safe_mode)
    differences = []
    for theirs in expected:
        ours = registry.find(theirs.kind, theirs.name)
        if (ours.distribution, ours.version) != (theirs.distribution, theirs.version):
            differences.append(
                f"{theirs.kind}/{theirs.name}: the core has "
                f"{theirs.distribution} {theirs.version}, "
                f"this process {ours.source}"
            )
    if differences:
        raise PluginError(f"plugins differ from the engine core's: {'; '.join(differences)}")
