"""``uniproc``: one worker in the engine's own process and thread, so a debugger stops where you
are.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hotshoe.api import (
    Component,
    Executor,
    ExecutorContext,
    PendingResult,
    PluginOptions,
    StepPlan,
    StepResult,
    hookimpl,
)

_MAX_WAITING = 16


class UniprocOptions(PluginOptions):
    """None: there is nothing to choose."""


class Done:
    """A step that ran when it was submitted."""

    def __init__(self, result: StepResult | None, error: Exception | None) -> None:
        self._result = result
        self._error = error

    def result(self) -> StepResult:
        """What the worker returned or raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class UniprocExecutor(Executor):
    """Runs each plan inside ``submit``; grammars are compiled in threads beside it."""

    max_in_flight = 1

    def __init__(self, context: ExecutorContext) -> None:
        self._worker = context.create_worker(0)
        # these wait for the worker, which decides how many grammars are compiled at once
        self._background = ThreadPoolExecutor(_MAX_WAITING, thread_name_prefix="hotshoe-background")

    def submit(self, plan: StepPlan) -> PendingResult:
        try:
            return Done(self._worker.execute(plan), None)
        except Exception as error:
            # raised where the result is asked for, as with any other executor
            return Done(None, error)

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method == "compile_grammar":
            return self._background.submit(self._worker.call, method, *args)
        future: Future[Any] = Future()
        try:
            future.set_result(self._worker.call(method, *args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)
        self._worker.close()


def build(options: UniprocOptions, context: ExecutorContext) -> UniprocExecutor:
    """The factory."""
    return UniprocExecutor(context)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the executor."""
    return Component(contract="executor/0", factory=build, options=UniprocOptions)
