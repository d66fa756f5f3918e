"""Executor contract: where plans run. The core submits them in order and never knows what is
behind.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from hotshoe.api.types import StepPlan, StepResult


class PendingResult(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for it.

        Raises:
            EngineDeadError: if the worker died.
        """


class WorkerView(Protocol):
    """A worker as an executor drives it: all calls from one thread at a time, also ``result`` of
    what ``launch`` returns; steps in the order of the plans.
    """

    @property
    def max_in_flight(self) -> int:
        """How many steps are best launched before the first has its result. More are allowed, but
        nothing is gained by them.
        """

    def launch(self, plan: StepPlan) -> PendingResult:
        """Start a step, and don't wait for a device that computes it.

        Results needn't be asked for; the next steps don't depend on it.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its sampled tokens: ``launch(plan).result()``."""

    def call(self, method: str, *args: Any) -> Any:
        """A control-plane call, off the step path (``load``, ``allocate_kv_cache``,
        ``compile_grammar``, ...).
        """

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorContext:
    """What an executor is built on.

    Attributes:
        create_worker: builds the worker of a rank; must be called in the process and thread
            environment where it shall live.
    """

    create_worker: Callable[[int], WorkerView]


class Executor(ABC):
    """Runs plans on workers. Built once per engine as ``factory(options, ExecutorContext)``."""

    max_in_flight: int = 1
    """How many plans may be submitted before the first has its result."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> PendingResult:
        """Start a step. Plans are executed in the order of submission."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call ``WorkerView.call`` on the rank that samples; the result or the exception arrives in
        the future.

        ``compile_grammar`` must not hold up steps; everything else may.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the workers; idempotent."""

    def clock(self) -> float:
        """Seconds, monotonic; what arrival and token times are read from. A simulation overrides it
        with virtual time.
        """
        return time.monotonic()
