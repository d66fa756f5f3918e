"""Compilation in the worker: shared, cached, limited in time and number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest

from hotshoe.api import (
    CompiledGrammar,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    RequestError,
)
from hotshoe.errors import CompilersBusyError
from hotshoe.worker.grammar_compiler import GrammarCompiler, GuidedDecodingParts


class Anything(Grammar):
    def accept(self, token_ids: Sequence[int]) -> bool:
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        pass

    @property
    def is_terminated(self) -> bool:
        return False


class CompiledAnything(CompiledGrammar):
    def matcher(self) -> Grammar:
        return Anything()


class Backend(GuidedDecodingBackend):
    """Counts; hangs on ``hang`` until it's released, refuses ``odd``, breaks on ``broken``."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.compiled: list[str] = []

    def unsupported(self, spec: GrammarSpec) -> list[str]:
        return ["odd.keyword: not enforced"] if spec.value == "odd" else []

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.compiled.append(spec.value)
        if spec.value == "hang":
            assert self.released.wait(60)
        if spec.value == "broken":
            raise ZeroDivisionError("inside the library")
        return CompiledAnything()


def spec(value: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", value=value)


MakeCompiler = Callable[..., tuple[GrammarCompiler, list[Backend]]]


@pytest.fixture
def make() -> Any:
    made: list[Backend] = []

    def build(num_backends: int = 1, **limits: Any) -> tuple[GrammarCompiler, list[Backend]]:
        backends = [Backend() for _ in range(num_backends)]
        made.extend(backends)
        by_name = {f"b{at}": (lambda at=at: backends[at]) for at in range(num_backends)}
        return GrammarCompiler(GuidedDecodingParts(backends=by_name, **limits)), backends

    yield build
    for backend in made:
        backend.released.set()


def test_equal_constraints_are_compiled_once_and_get_a_matcher_each(make: MakeCompiler) -> None:
    compiler, (backend,) = make()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compiler.constraint(spec("a")), range(8)))
    assert backend.compiled == ["a"]
    assert len({id(one.grammar) for one in found}) == 8


def test_the_latest_constraints_are_kept(make: MakeCompiler) -> None:
    compiler, (backend,) = make(cache_size=2)
    for value in ("a", "b", "a", "c", "a", "b"):
        compiler.constraint(spec(value))
    assert backend.compiled == ["a", "b", "c", "b"]


def test_what_hangs_is_given_up_and_the_next_is_compiled(make: MakeCompiler) -> None:
    compiler, (backend,) = make(compile_timeout_s=0.5, num_compile_threads=2)
    for _ in range(3):  # again, it isn't even tried
        with pytest.raises(RequestError, match=r"longer to compile than guided_decoding\.comp"):
            compiler.constraint(spec("hang"))
    assert backend.compiled == ["hang"]
    assert compiler.constraint(spec("a")).backend is backend
    backend.released.set()


def test_threads_that_hang_are_not_replaced_by_more(make: MakeCompiler) -> None:
    compiler, (backend,) = make(compile_timeout_s=0.5, num_compile_threads=1)
    compiler.constraint(spec("kept"))
    with pytest.raises(RequestError, match="longer to compile"):
        compiler.constraint(spec("hang"))
    assert compiler.num_stuck == 1
    with pytest.raises(
        CompilersBusyError,
        match="all 1 threads that compile constraints are busy, 1 of them with constraints that "
        "were given up; try again later",
    ):
        compiler.constraint(spec("a"))
    assert compiler.constraint(spec("kept")).backend is backend
    assert backend.compiled == ["kept", "hang"]
    backend.released.set()
    while compiler.num_stuck:
        sleep(0.01)
    assert compiler.constraint(spec("a")).backend is backend


def test_a_thread_that_is_only_slow_is_waited_for(make: MakeCompiler) -> None:
    compiler, (backend,) = make(compile_timeout_s=20, num_compile_threads=1)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(compiler.constraint, spec("hang"))
        while not backend.compiled:
            sleep(0.01)
        following = pool.submit(compiler.constraint, spec("a"))
        assert not following.done()
        backend.released.set()
        assert slow.result(20).backend is following.result(20).backend is backend


def test_an_error_inside_the_library_is_the_request_s_and_is_not_kept(make: MakeCompiler) -> None:
    compiler, (backend,) = make()
    for _ in range(2):
        with pytest.raises(RequestError, match="backend 'b0' failed on it: ZeroDivisionError"):
            compiler.constraint(spec("broken"))
    assert backend.compiled == ["broken", "broken"]


def test_a_refusal_goes_to_the_next_backend_only_if_configured_so(make: MakeCompiler) -> None:
    compiler, _ = make(2)
    with pytest.raises(RequestError, match=r"structured_outputs\.regex: can't be enforced: odd\.k"):
        compiler.constraint(spec("odd"))
    falling, backends = make(2, fallback=True)
    assert falling.constraint(spec("a")).backend is backends[0]
    with pytest.raises(RequestError, match="can't be enforced"):
        falling.constraint(spec("odd"))
    assert falling.constraint(spec("a"), "b1").backend is backends[1]


def test_without_a_backend_the_reason_is_given(make: MakeCompiler) -> None:
    compiler, _ = make(0, why_none="nothing fits")
    with pytest.raises(RequestError, match="structured_outputs: nothing fits"):
        compiler.constraint(spec("a"))
