"""``Drafting``: after each step, the drafts that the next one verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from torch import Tensor

from hotshoe.api import (
    DraftDraws,
    DraftTokens,
    PluginContractError,
    ProposeInput,
    Proposer,
    StepPlan,
)
from hotshoe.worker.batch import InputBatch, StepInputs
from hotshoe.worker.draft_control import DraftControl, StepOutcome
from hotshoe.worker.draft_forwards import WorkerDraftForwards


class Drafting:
    """Asks a proposer for drafts. They stay here, only their numbers go back to the engine.

    Args:
        proposer: that drafts.
        control: says how many to ask for.
        forwards: runs the proposer's layers.
        batch: whose ``drafts`` are filled.
        vocab_size: of the target.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        proposer: Proposer,
        control: DraftControl,
        forwards: WorkerDraftForwards | None,
        batch: InputBatch,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._proposer = proposer
        self._control = control
        self._forwards = forwards
        self._batch = batch
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._kept: dict[int, list[int]] = {}  # by row, for the next step
        self._needs_every_step = proposer.requirements.needs_every_step

    @property
    def num_off(self) -> int:
        """Requests of the last step that might have used drafts, but got none."""
        return self._control.num_off

    def enter(self, row: int, request_id: str) -> None:
        """A request takes a row."""
        self._control.start(row, request_id)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Requests have ended."""
        self._control.finish(request_ids)
        if self._proposer.requirements.needs_finished_requests:
            self._proposer.forget(request_ids)

    def run(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        hidden_states: Mapping[int, Tensor],
        new_token_ids: Sequence[Sequence[int]],
        step_time_s: float,
        draws: Callable[[], DraftDraws | None],
    ) -> list[int]:
        """Draft after a step.

        Args:
            plan: of the step.
            inputs: of the step.
            hidden_states: that it gave, as ``ProposeInput`` has them.
            new_token_ids: per request, the tokens that it gave.
            step_time_s: that it took.
            draws: makes what draws drafts from a proposer's logits.

        Returns:
            Per request, drafts that the next step is to verify.
        """
        control, batch = self._control, self._batch
        nothing = [0] * len(plan.rows)
        if not any(inputs.drafts) and control.rest(plan.rows, new_token_ids, step_time_s):
            if self._needs_every_step:
                self._propose(plan, inputs, hidden_states, nothing, nothing, nothing)
            return nothing
        num_drafted = [len(drafts) for drafts in inputs.drafts]
        outcome = StepOutcome(
            rows=plan.rows,
            new_token_ids=new_token_ids,
            num_drafted=self._num_own(plan.rows, inputs.drafts),
            num_computed=inputs.num_tokens.tolist(),
            seconds=step_time_s,
        )
        asked = control.ask(outcome, self._room(plan, new_token_ids))
        started = perf_counter()
        drafts: list[list[int]] = [[] for _ in nothing]
        is_asked = any(asked)
        if is_asked or self._needs_every_step:
            num_accepted = [max(len(tokens) - 1, 0) for tokens in new_token_ids]
            proposal = self._propose(
                plan,
                inputs,
                hidden_states,
                asked,
                num_drafted,
                num_accepted,
                draws() if is_asked else None,
            )
            drafts = self._checked(proposal, asked)
        kept = control.keep(drafts, perf_counter() - started)
        for row, chain in zip(plan.rows, kept, strict=True):
            batch.drafts[row] = self._kept[row] = chain
        return [len(chain) for chain in kept]

    def _num_own(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[int]:
        """Of drafts that were verified, how many came from here: a grammar's tell nothing."""
        return [
            len(some) if some == self._kept.get(row, [])[: len(some)] else 0
            for row, some in zip(rows, drafts, strict=True)
        ]

    def _room(self, plan: StepPlan, new_token_ids: Sequence[Sequence[int]]) -> list[int]:
        """The most drafts that each request can use."""
        most, last = self._proposer.max_draft_tokens, self._max_model_len - 1
        num_tokens = self._batch.num_tokens
        return [
            max(min(most, last - int(num_tokens[row])), 0) if tokens else 0
            for row, tokens in zip(plan.rows, new_token_ids, strict=True)
        ]

    def _propose(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        hidden_states: Mapping[int, Tensor],
        asked: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        draws: DraftDraws | None = None,
    ) -> DraftTokens:
        batch, rows = self._batch, plan.rows
        if self._forwards is not None:
            self._forwards.begin(rows)
        return self._proposer.propose(
            ProposeInput(
                request_ids=plan.request_ids,
                token_ids=[batch.history(row) for row in rows],
                num_computed_tokens=[int(batch.num_computed_tokens[row]) for row in rows],
                max_draft_tokens=asked,
                num_drafted=num_drafted,
                num_accepted=num_accepted,
                query_start_loc=inputs.query_start_loc.tolist(),
                hidden_states=hidden_states,
                draws=draws,
                is_dormant=self._control.dormant(rows),
            )
        )

    def _checked(self, proposal: DraftTokens, asked: Sequence[int]) -> list[list[int]]:
        name = type(self._proposer).__name__
        if proposal.parents is not None:
            raise PluginContractError(
                f"proposer {name} returned a draft tree; only chains can be verified yet"
            )
        if len(proposal.token_ids) != len(asked):
            raise PluginContractError(
                f"proposer {name} returned drafts for {len(proposal.token_ids)} requests, "
                f"expected {len(asked)}"
            )
        drafts = []
        for chain, most in zip(proposal.token_ids, asked, strict=True):
            tokens = [int(token) for token in chain]
            is_valid = not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab_size)
            if len(tokens) > most or not is_valid:
                raise PluginContractError(
                    f"proposer {name} returned {tokens!r}; "
                    f"allowed: at most {most} ids below {self._vocab_size}"
                )
            drafts.append(tokens)
        return drafts
