"""``LLM``: the engine in your own process, for scripts, notebooks and experiments."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Literal

import msgspec

from hotshoe.api import FinishedRequest, SamplingParams, StepRecord
from hotshoe.config import load_config
from hotshoe.config.load import ResolvedConfig
from hotshoe.engine.assemble import build_engine
from hotshoe.engine.core import EngineCore
from hotshoe.engine.request import EngineRequest, RequestUpdate
from hotshoe.engine.resolution import KIND_OF_SECTION, Choice
from hotshoe.entrypoints.interrupts import DeferredInterrupt
from hotshoe.entrypoints.outputs import OutputProcessor, RequestOutput
from hotshoe.entrypoints.requests import (
    check_constraint,
    check_tokenizer,
    default_sampling_params,
    is_token_id,
    plain_lists,
    token_ids,
    with_bad_words,
)
from hotshoe.entrypoints.turns import Turns
from hotshoe.errors import ConfigError, HotshoeError, RequestError, UnavailableError
from hotshoe.text.chat import render_chat
from hotshoe.text.tokenizer import MissingTokenizer, Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_SWAPPABLE = ("scheduler", "sampler")
_Inbox = deque[RequestUpdate]


class LLM:
    """A model with an engine around it, in this process.

    Every part can be named or handed in: ``LLM(scheduler="priority")``, or
    ``LLM(scheduler=MyScheduler())`` with an object that implements ``hotshoe.api.Scheduler``. Use
    it as a context manager, or call ``close``. Several threads may share one, and several streams
    may be open at once: whoever steps the engine moves everybody's requests on.

    Args:
        model: a folder, a GGUF file, a hub id, ``embedded``; or settings of the model section.
        config: a config file; keyword arguments take precedence over it and the environment.
        arguments: settings by their well-known names (``max_model_len=2048``), whole sections
            (``cache={"num_blocks": 100}``), and components by name or as objects.

    Attributes:
        engine: the engine core; ``engine.step()`` is public for people who study it.
        tokenizer: the model's; a model with random weights may have none, and takes token ids then.

    Raises:
        HotshoeError: whatever stands in the way, with the remedy.
    """

    def __init__(
        self,
        model: str | Mapping[str, Any] | None = None,
        *,
        config: str | None = None,
        **arguments: Any,
    ) -> None:
        instances = {
            section: arguments.pop(section)
            for section in [*KIND_OF_SECTION]
            if section in arguments and not _is_setting(arguments[section])
        }
        if model is not None:
            arguments["model"] = model
        from pathlib import Path

        resolved = load_config(Path(config) if config else None, overrides=arguments)
        self._start(resolved, instances)

    @classmethod
    def from_config(
        cls, resolved: ResolvedConfig, instances: Mapping[str, object] | None = None
    ) -> LLM:
        """An LLM from a config that is resolved already, as the command line does it.

        Args:
            instances: ready-made components by config section, in place of what it names.
        """
        llm = cls.__new__(cls)
        llm._start(resolved, instances or {})
        return llm

    def _start(self, resolved: ResolvedConfig, instances: Mapping[str, object]) -> None:
        self.config = resolved.config
        self._engine = build_engine(resolved.config, instances=instances)
        self.engine: EngineCore = self._engine.core
        self.tokenizer: Tokenizer = self._engine.tokenizer
        self._outputs = OutputProcessor(self.tokenizer)
        self._numbers = count()
        self._inboxes: dict[str, _Inbox] = {}
        # not a method: an LLM that nobody refers to is gone at once, its weights with it
        self._turns = Turns(partial(_clean_up, self.engine, self._inboxes))
        self._is_closed = False

    # -- generating -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts, all at once, and wait for them.

        Args:
            prompts: texts or token ids, one or many.
            sampling_params: for all, or one per prompt; None = ``default_sampling_params()``.
            priority: for schedulers that look at it; lower runs first.
            cache_salt: only requests with an equal salt share cached prefixes.
            metadata: free values for schedulers, for all or one per prompt.
            use_tqdm: show a progress bar.
            on_error: what happens when a request fails while it runs: ``raise`` after the
                others have finished, or ``return`` it with ``finish_reason`` ``error``.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: if a prompt or parameter can't be served; nothing is run then.
            UnavailableError: if it can't be served now, but may be later.
            SchedulerError: if the scheduler broke its contract; all requests of this call are
                aborted.
            KeyboardInterrupt: on Ctrl-C, after the current step; the engine stays usable.
        """
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error: got {on_error!r}, allowed: 'raise' or 'return'")
        entries = self._entries(prompts, sampling_params, priority, cache_salt, metadata)
        final: dict[str, RequestOutput] = {}
        interrupt = DeferredInterrupt()
        with interrupt, self._progress(len(entries), use_tqdm) as bar:
            for output in self._run(entries, interrupt):
                if output.finished:
                    final[output.request_id] = output
                    bar.update(1)
        outputs = [final[request_id] for request_id, _, _ in entries]
        if on_error == "raise":
            _raise_failed(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer conversations. Like ``generate`` with prompts rendered by the model's chat
        template.

        Args:
            messages: one conversation or many; a message has ``role`` and ``content``.
            sampling_params: as in ``generate``.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: continue the last message instead.
            chat_template_kwargs: further variables of the template.
            kwargs: as in ``generate``.
        """
        return self.generate(
            [
                self.render_chat(
                    one,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
                for one in _conversations(messages)
            ],
            sampling_params,
            **kwargs,
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **kwargs: Any
    ) -> Generator[RequestOutput]:
        """Complete one prompt and yield the same output object after every step that changed it.

        ``output.outputs[i].new_text`` is what came with the step. Closing the iterator early aborts
        the request.
        """
        names = ("priority", "cache_salt", "metadata")
        unknown = set(kwargs) - set(names)
        if unknown:
            raise TypeError(f"stream() got unexpected arguments {sorted(unknown)}")
        entries = self._entries(
            [prompt],
            sampling_params,
            kwargs.get("priority", 0),
            kwargs.get("cache_salt"),
            kwargs.get("metadata"),
        )
        # between two steps whoever reads the stream may be interrupted
        for output in self._run(entries, DeferredInterrupt()):
            yield output
            if output.finished:
                _raise_failed([output])

    def render_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Token ids of a conversation."""
        return render_chat(self.tokenizer, messages, **kwargs)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling defaults (its ``generation_config.json``), with changes; without
        a tokenizer, ``detokenize`` is false.
        """
        if isinstance(self.tokenizer, MissingTokenizer):
            changes.setdefault("detokenize", False)
        return default_sampling_params(self.generation_config, **changes)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's ``generation_config.json``; empty if it has none, or it is not to be used."""
        return self._engine.generation_config

    # -- changing and watching ------------------------------------------------------------

    def use(self, **components: Any) -> None:
        """Swap a scheduler or sampler without loading weights again.

        ``llm.use(scheduler="priority")``, ``llm.use(scheduler={"name": "x", "options": {...}})`` or
        ``llm.use(scheduler=MyScheduler())``.

        Raises:
            ConfigError: for anything else, or while requests are alive.
            PluginError: if the plugin can't be used; the old one stays.
        """
        unknown = [name for name in components if name not in _SWAPPABLE]
        if unknown:
            raise ConfigError(
                f"use() can swap {' and '.join(_SWAPPABLE)}, not {', '.join(unknown)}; "
                "build a new LLM for that"
            )
        with self._turn():
            if self.engine.requests:
                raise ConfigError(
                    f"{len(self.engine.requests)} requests are alive; finish or abort them first"
                )
            # all are built before the first takes its place
            try:
                built = [self._build(section, chosen) for section, chosen in components.items()]
                for choice, component in built:
                    self._engine.put(choice, component)
            finally:
                self._engine.settle_plugins()

    def _build(self, section: str, component: Any) -> tuple[Choice, Any]:
        resolver = self._engine.resolver
        if not _is_setting(component):
            choice = resolver.handed_in(section, component)
        else:
            selected: dict[str, Any] = (
                {"name": component} if isinstance(component, str) else dict(component or {})
            )
            name = selected.pop("name", None)
            options = selected.pop("options", {})
            if not isinstance(name, str) or not isinstance(options, Mapping) or selected:
                raise ConfigError(
                    f"{section}: expected a name, or name and options, got {component!r}"
                )
            choice = self._engine.choose(section, name, options)
        if section == "scheduler":
            return choice, resolver.build(choice, self._engine.scheduler_context())
        return choice, resolver.build(choice, self._engine.sampler_context())

    @property
    def components(self) -> dict[str, str]:
        """Which plugin fills which place, with its distribution, by config section."""
        return self._engine.resolution.components()

    def on_step(self, observer: Any) -> None:
        """Call ``observer(record: StepRecord)`` after every step."""
        self.engine.step_observers.append(observer)

    def on_finish(self, observer: Any) -> None:
        """Call ``observer(request: FinishedRequest)`` when a request has finished, failed or been
        aborted.
        """
        self.engine.finish_observers.append(observer)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix."""
        with self._turn():
            return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort what runs and free the workers; idempotent. Open streams end with ``abort``."""
        if self._is_closed:
            return
        with self._turns.take():
            self._is_closed = True
            self._turns.close()
            self.engine.abort(list(self.engine.requests))
            _deliver(self._inboxes, self.engine.take_updates())
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _entries(
        self,
        prompts: Any,
        sampling_params: Any,
        priority: Any,
        cache_salt: str | None,
        metadata: Any,
    ) -> list[tuple[str, str | None, list[EngineRequest]]]:
        """Per prompt: its id, its text, its engine requests."""
        self._check_open()
        many = _prompts(prompts)
        size = len(many)
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        params = _per_prompt(sampling_params, size, "sampling_params")
        priorities = _per_prompt(priority, size, "priority")
        metadatas = _per_prompt({} if metadata is None else metadata, size, "metadata")
        entries = []
        for prompt, one, rank, extra in zip(many, params, priorities, metadatas, strict=True):
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params: expected SamplingParams, got {one!r}")
            if not isinstance(extra, Mapping):
                raise RequestError(f"metadata: got {extra!r}, allowed: a mapping")
            check_constraint(one)
            request_id = f"offline-{next(self._numbers)}"
            text = prompt if isinstance(prompt, str) else None
            ids = token_ids(self.tokenizer, prompt)
            check_tokenizer(self.tokenizer, one)
            requests = self._outputs.split(
                request_id,
                ids,
                with_bad_words(self.tokenizer, one),
                priority=rank,
                cache_salt=cache_salt,
                metadata=dict(extra),
            )
            entries.append((request_id, text, requests))
        return entries

    def _run(
        self,
        entries: list[tuple[str, str | None, list[EngineRequest]]],
        interrupt: DeferredInterrupt,
    ) -> Generator[RequestOutput]:
        """Add requests, step until they have ended, yield outputs as they change."""
        inbox: _Inbox = deque()
        own: list[str] = []
        try:
            with self._turn():
                for request_id, text, requests in entries:
                    self._add(request_id, text, requests, inbox, own)
            unfinished = {request_id for request_id, _, _ in entries}
            while unfinished:
                self._advance(inbox, own, interrupt)
                for output in self._outputs_of(inbox):
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            # whatever is left was cut short: an error, Ctrl-C, or an iterator closed early
            self._outputs.forget(own)
            for one in own:
                self._inboxes.pop(one, None)
            self._turns.leave_behind(own)

    def _add(
        self,
        request_id: str,
        text: str | None,
        requests: Sequence[EngineRequest],
        inbox: _Inbox,
        own: list[str],
    ) -> None:
        seeds: list[int] = []
        for request in requests:
            if seeds:
                # choices are told apart by their index: one seed gives them all again
                request = msgspec.structs.replace(request, seed=seeds[0])
            seeds.append(self.engine.add_request(request))
            self._inboxes[request.request_id] = inbox
            own.append(request.request_id)
        self._outputs.start(request_id, text, requests, seeds)

    def _advance(self, inbox: _Inbox, own: Sequence[str], interrupt: DeferredInterrupt) -> None:
        """Step the engine until it has something for these requests, or has been a step further."""
        if inbox:
            return
        self.engine.wait()
        with self._turns.take():
            # another thread's step may have brought it by now
            if not inbox:
                with interrupt:
                    _deliver(self._inboxes, self.engine.step())
            if not inbox and not any(one in self.engine.requests for one in own):
                raise HotshoeError(
                    "what the engine had to say about these requests was taken by another caller "
                    "of engine.step(); don't step the engine by hand while a call is running"
                )

    def _outputs_of(self, inbox: _Inbox) -> list[RequestOutput]:
        """The outputs that the updates in an inbox change."""
        updates = [inbox.popleft() for _ in range(len(inbox))]
        changed, stopped = self._outputs.process(updates)
        if stopped:
            with self._turns.take():
                self.engine.abort(stopped, finish_reason="stop")
                _deliver(self._inboxes, self.engine.take_updates())
            changed += self._outputs.process([inbox.popleft() for _ in range(len(inbox))])[0]
        return changed

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._turns.take():
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise HotshoeError("this LLM is closed; build a new one")

    @contextmanager
    def _progress(self, total: int, is_shown: bool) -> Iterator[Any]:
        from tqdm.auto import tqdm

        with tqdm(total=total, desc="requests", unit="req", disable=not is_shown) as bar:
            yield bar


def _deliver(inboxes: Mapping[str, _Inbox], updates: Iterable[RequestUpdate]) -> None:
    """Hand updates to the calls whose requests they are about."""
    for update in updates:
        inbox = inboxes.get(update.request_id)
        if inbox is not None:
            inbox.append(update)


def _clean_up(
    engine: EngineCore, inboxes: Mapping[str, _Inbox], request_ids: Sequence[str]
) -> None:
    """End requests whose caller is gone; within a turn."""
    engine.abort(request_ids)
    if not engine.requests:
        _deliver(inboxes, engine.take_updates())
        engine.drain()


def _is_setting(component: Any) -> bool:
    return component is None or isinstance(component, str | Mapping)


def _prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = plain_lists(prompts)
    is_refused = isinstance(prompts, bytes | bytearray | Mapping | Set)
    if is_refused or not isinstance(prompts, Iterable):
        raise RequestError(
            "prompts: expected a text, a list of token ids, or a list of these, "
            f"got {prompts!r:.100}"
        )
    many = list(prompts)
    if many and all(is_token_id(one) for one in many):
        return [many]
    return many


def _conversations(messages: Any) -> list[Sequence[Message]]:
    many = list(messages)
    if many and isinstance(many[0], Mapping):
        return [many]
    return many


def _per_prompt(value: Any, size: int, name: str) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != size:
            raise RequestError(f"{name} has {len(value)} entries for {size} prompts")
        return list(value)
    return [value] * size


def _raise_failed(outputs: Sequence[RequestOutput]) -> None:
    failed = {
        f"{output.request_id} choice {choice.index}: {choice.error}": choice.error_field
        for output in outputs
        for choice in output.outputs
        if choice.finish_reason == "error"
    }
    if failed:
        if all(
            choice.is_unavailable
            for output in outputs
            for choice in output.outputs
            if choice.finish_reason == "error"
        ):
            raise UnavailableError("; ".join(failed))
        fields = set(failed.values())
        raise RequestError("; ".join(failed), field=fields.pop() if len(fields) == 1 else None)


__all__ = ["LLM", "FinishedRequest", "StepRecord"]
