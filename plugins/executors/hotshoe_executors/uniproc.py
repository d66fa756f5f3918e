"""``uniproc``: one worker in the engine's own process and thread, so a debugger stops where you
are.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pydantic import Field

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
    """How far the worker is ahead of what is known of its steps."""

    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Steps that are submitted before the first has its result; none: 2 on a GPU "
        "without drafts, which then never waits for Python, and 1 otherwise.",
    )


class Failed:
    """A step that couldn't be started."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        """Raise what the worker raised."""
        raise self._error


class UniprocExecutor(Executor):
    """Starts each plan inside ``submit``; grammars are compiled in threads beside it.

    Args:
        context: makes the worker.
        max_in_flight: see ``UniprocOptions``.
    """

    def __init__(self, context: ExecutorContext, max_in_flight: int | None = None) -> None:
        self._worker = context.create_worker(0)
        self.max_in_flight = max_in_flight or self._worker.max_in_flight
        # these wait for the worker, which decides how many grammars are compiled at once
        self._background = ThreadPoolExecutor(_MAX_WAITING, thread_name_prefix="hotshoe-background")

    def submit(self, plan: StepPlan) -> PendingResult:
        try:
            return self._worker.launch(plan)
        except Exception as error:
            # raised where the result is asked for, as with any other executor
            return Failed(error)

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
    return UniprocExecutor(context, options.max_in_flight)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the executor."""
    return Component(contract="executor/0", factory=build, options=UniprocOptions)
