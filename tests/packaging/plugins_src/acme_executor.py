"""``threaded``: the worker in its own thread, as many steps in flight as the options say."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pydantic import Field

from hotshoe.api import Component, Executor, ExecutorContext, PluginOptions, StepPlan, hookimpl

THREADS: set[str] = set()
"""Names of the threads that steps ran in."""


class ThreadedOptions(PluginOptions):
    max_in_flight: int = Field(default=1, ge=1)


class ThreadedExecutor(Executor):
    def __init__(self, options: ThreadedOptions, context: ExecutorContext) -> None:
        self.max_in_flight = options.max_in_flight
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="acme-steps")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="acme-background")
        self._worker = self._steps.submit(context.create_worker, 0).result()

    def submit(self, plan: StepPlan) -> Future[Any]:
        return self._steps.submit(self._execute, plan)

    def call(self, method: str, *args: Any) -> Future[Any]:
        pool = self._background if method == "compile_grammar" else self._steps
        return pool.submit(self._worker.call, method, *args)

    def close(self) -> None:
        self._background.shutdown()
        self._steps.shutdown()
        self._worker.close()

    def _execute(self, plan: StepPlan) -> Any:
        THREADS.add(threading.current_thread().name)
        return self._worker.execute(plan)


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="executor/0", factory=ThreadedExecutor, options=ThreadedOptions)
