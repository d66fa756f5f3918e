"""Turns constraints of requests into matchers: which backend, how large, how long, how often."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from hotshoe.api.guided_decoding import (
    CompiledGrammar,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
)
from hotshoe.errors import CompilersBusyError, HotshoeError, RequestError

logger = logging.getLogger(__name__)

FIELD = "structured_outputs"
"""The request parameter that errors are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParts:
    """The loaded backends, and the limits of what requests may ask of them.

    Attributes:
        backends: builds each by its name, the default one first; none = guided decoding is off.
        why_none: why there are none, for people to read.
        jump_forward: whether tokens that a grammar forces are offered as drafts.
    """

    backends: Mapping[str, Callable[[], GuidedDecodingBackend]] = field(default_factory=dict)
    why_none: str = "no guided-decoding backend is configured; set guided_decoding.name"
    jump_forward: bool = False
    fallback: bool = False
    max_spec_bytes: int = 2**20
    compile_timeout_s: float = 10.0
    num_compile_threads: int = 2
    cache_size: int = 256


@dataclass(frozen=True, slots=True)
class Constraint:
    """A request's matcher and the backend that it's of."""

    grammar: Grammar
    backend: GuidedDecodingBackend


_Compiled = tuple[CompiledGrammar, GuidedDecodingBackend]
_Key = tuple[str, GrammarSpec]


class GrammarCompiler:
    """Compiles constraints in threads of its own, and keeps the latest. Thread-safe."""

    def __init__(self, parts: GuidedDecodingParts) -> None:
        self._parts = parts
        self._slots = threading.Semaphore(parts.num_compile_threads)
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._backends: dict[str, GuidedDecodingBackend] = {}
        self._kept: OrderedDict[_Key, _Compiled] = OrderedDict()
        self._running: dict[_Key, Future[_Compiled]] = {}
        self._given_up: set[_Key] = set()

    @property
    def num_stuck(self) -> int:
        """Threads that still compile a constraint that was given up."""
        return len(self._given_up)

    def constraint(self, spec: GrammarSpec, backend: str | None = None) -> Constraint:
        """A fresh matcher for a constraint; waits until it's compiled.

        Args:
            spec: of the request.
            backend: name of the backend that the request asks for; None = the default one.

        Raises:
            RequestError: if the constraint is malformed, too large, too slow to compile, or if
                the backend can't enforce all of it.
            CompilersBusyError: if no thread is free to compile it.
        """
        names = self._names(backend)
        num_bytes = _num_bytes(spec)
        if num_bytes > self._parts.max_spec_bytes:
            raise _error(
                spec,
                f"has {num_bytes} bytes but guided_decoding.max_spec_bytes is "
                f"{self._parts.max_spec_bytes}; shorten it",
            )
        for name, following in zip(names, [*names[1:], None], strict=True):
            try:
                compiled, owner = self._compiled(name, spec)
            except _Unenforceable as refusal:
                if following is None:
                    raise
                logger.info("%s goes from %s to %s", refusal, name, following)
            else:
                return Constraint(compiled.matcher(), owner)
        raise AssertionError("a request has at least one backend")

    def _names(self, backend: str | None) -> list[str]:
        loaded = list(self._parts.backends)
        if not loaded:
            raise RequestError(f"{FIELD}: {self._parts.why_none}", field=FIELD)
        if backend is None:
            return loaded if self._parts.fallback else loaded[:1]
        if backend not in loaded:
            raise RequestError(
                f"{FIELD}.backend: got {backend!r}, allowed: {', '.join(map(repr, loaded))}, "
                "the loaded backends; drop it, or load another with guided_decoding.others",
                field=f"{FIELD}.backend",
            )
        return [backend]

    def _backend(self, name: str) -> GuidedDecodingBackend:
        with self._building:
            if name not in self._backends:
                self._backends[name] = self._parts.backends[name]()
            return self._backends[name]

    def _compiled(self, name: str, spec: GrammarSpec) -> _Compiled:
        key = (name, spec)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            if key in self._given_up:
                raise self._too_slow(spec)
            future = self._running.get(key)
            is_first = future is None
            if future is None:
                future = self._running[key] = Future()
        if is_first:
            self._start(key, future)
        try:
            # the thread that waits for a slot has as long again
            return future.result(2 * self._parts.compile_timeout_s)
        except TimeoutError:
            raise self._too_slow(spec) from None

    def _start(self, key: _Key, future: Future[_Compiled]) -> None:
        """Compile in a thread, for all requests that wait for the same."""
        name, spec = key
        timeout_s = self._parts.compile_timeout_s
        # threads that are stuck may stay so: nobody needs to wait for them
        is_stuck = self.num_stuck >= self._parts.num_compile_threads
        if not self._slots.acquire(timeout=0 if is_stuck else timeout_s):
            self._settle(key, future, self._too_busy(spec))
            return
        outcome: Future[_Compiled] = Future()

        def run() -> None:
            try:
                outcome.set_result(self._compile(name, spec))
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._slots.release()
                with self._lock:
                    self._given_up.discard(key)

        # not a pool: at exit the interpreter waits for threads of pools, also for one that hangs
        threading.Thread(target=run, name="hotshoe-grammar", daemon=True).start()
        try:
            found = outcome.result(timeout_s)
        except TimeoutError:
            with self._lock:
                if not outcome.done():
                    self._given_up.add(key)
            logger.warning(
                "compiling %s of %d bytes takes more than %g s and is given up, but can't be "
                "stopped; %d of %d threads that compile are stuck so",
                *(_path(spec), _num_bytes(spec), timeout_s),
                *(self.num_stuck, self._parts.num_compile_threads),
            )
            self._settle(key, future, self._too_slow(spec))
        except BaseException as error:
            self._settle(key, future, error)
        else:
            self._settle(key, future, found)

    def _settle(
        self, key: _Key, future: Future[_Compiled], outcome: _Compiled | BaseException
    ) -> None:
        with self._lock:
            del self._running[key]
            if not isinstance(outcome, BaseException) and self._parts.cache_size:
                self._kept[key] = outcome
                while len(self._kept) > self._parts.cache_size:
                    self._kept.popitem(last=False)
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _compile(self, name: str, spec: GrammarSpec) -> _Compiled:
        backend = self._backend(name)
        try:
            reasons = backend.unsupported(spec)
            if not reasons:
                return backend.compile(spec), backend
        except RequestError as error:
            raise _error(spec, str(error)) from error
        except HotshoeError:
            raise
        except Exception as error:
            logger.exception("backend %s failed on %s", name, _path(spec))
            raise _error(spec, f"backend {name!r} failed on it: {error!r}") from error
        raise _Unenforceable(f"{_path(spec)}: can't be enforced: {'; '.join(reasons)}", field=FIELD)

    def _too_busy(self, spec: GrammarSpec) -> CompilersBusyError:
        num_threads, num_stuck = self._parts.num_compile_threads, self.num_stuck
        stuck = f", {num_stuck} of them with constraints that were given up" if num_stuck else ""
        logger.warning(
            "%s is refused: all %d threads that compile are busy%s", _path(spec), num_threads, stuck
        )
        return CompilersBusyError(
            f"{FIELD}: all {num_threads} threads that compile constraints are busy{stuck}; try "
            "again later, or raise guided_decoding.num_compile_threads"
        )

    def _too_slow(self, spec: GrammarSpec) -> RequestError:
        return _error(
            spec,
            "took longer to compile than guided_decoding.compile_timeout_s, which is "
            f"{self._parts.compile_timeout_s:g}; simplify it",
        )


class _Unenforceable(RequestError):
    """A constraint that another backend may be able to enforce."""


def _path(spec: GrammarSpec) -> str:
    return f"{FIELD}.{spec.kind}"


def _error(spec: GrammarSpec, message: str) -> RequestError:
    return RequestError(f"{_path(spec)}: {message}", field=FIELD)


def _num_bytes(spec: GrammarSpec) -> int:
    try:
        return len(spec.value.encode())
    except UnicodeEncodeError as error:
        raise _error(
            spec, f"holds half of a surrogate pair at position {error.start}; send valid Unicode"
        ) from None
