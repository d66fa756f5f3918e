"""Steps between their launch and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hotshoe.api import PositionLogprobs, StepPlan, StepResult
from hotshoe.worker.batch import StepInputs
from hotshoe.worker.sampling import Scores, StartedSampling

if TYPE_CHECKING:
    from hotshoe.worker.staged_batch import Placeholders


@dataclass(slots=True)
class PromptScores:
    """Log probabilities of some prompt tokens that are being computed.

    Attributes:
        arrive: waits for the tensors of ``scores``, and gives them as they are on the host.
    """

    scores: Scores
    arrive: Callable[[], Sequence[Tensor]]

    def entries(self) -> list[PositionLogprobs]:
        """What is reported of each token."""
        return self.scores.entries(self.arrive())


@dataclass(slots=True)
class LaunchedStep:
    """A step whose tokens aren't known yet.

    Attributes:
        sampled: indices in the plan's columns of the requests that get tokens; ``sampling`` is
            None if none does.
        hidden_states: by layer, those that the proposer wants.
        scored: prompt tokens, by index in the plan's columns.
        times_s: when the launch began, had its inputs, and had asked the device for all that it
            computes.
        placeholders: what stands for the tokens in the batch; None = nothing does.
    """

    plan: StepPlan
    inputs: StepInputs
    sampled: list[int]
    sampling: StartedSampling | None
    hidden_states: Mapping[int, Tensor]
    scored: dict[int, list[PromptScores]]
    times_s: tuple[float, float, float]
    placeholders: Placeholders | None = None


@dataclass(slots=True)
class FinishedStep:
    """A ``PendingResult`` that doesn't have to be waited for."""

    outcome: StepResult

    def result(self) -> StepResult:
        """What came of the step."""
        return self.outcome


class FinishesSteps(Protocol):
    """The runner, as far as pending steps are concerned."""

    def finish_until(self, step: PendingStep) -> None:
        """Finish a step, and before it all that were launched before it."""


class PendingStep:
    """A ``PendingResult`` that is finished when somebody asks for it, or the next steps need it.

    Attributes:
        launched: what finishing it takes; None once it is finished.
    """

    __slots__ = ("_error", "_outcome", "_runner", "launched")

    def __init__(self, runner: FinishesSteps, launched: LaunchedStep) -> None:
        self.launched: LaunchedStep | None = launched
        self._runner: FinishesSteps | None = runner
        self._outcome: StepResult | None = None
        self._error: Exception | None = None

    def settle(self, outcome: StepResult | None, error: Exception | None) -> None:
        """Say what came of it, and let go of everything else."""
        self._outcome, self._error = outcome, error
        self._runner = self.launched = None

    def result(self) -> StepResult:
        """What came of the step, once the device has computed it."""
        if self._runner is not None:
            self._runner.finish_until(self)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome
