"""Plain records that cross process borders: plans, results, and what observers see.

All are frozen ``msgspec`` structs: built in a tenth of a microsecond, encoded to msgpack without
further code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hotshoe.api.sampling_params import SamplingParams

BlockIds = tuple[tuple[int, ...], ...]
"""Physical block ids, one tuple per cache group."""


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the workers have not seen yet. Prompt and parameters travel only here.

    Attributes:
        row: persistent index into the workers' batch arrays, ``0 <= row < max_num_seqs``, until
            preempted or finished.
        prompt_token_ids: the whole prompt.
        seed: 64-bit; the resolved one when the request gave none.
        choice_index: which of the ``n`` choices of its prompt this is.
        num_computed_tokens: tokens whose KV a prefix hit supplies.
        block_ids: every block allocated so far.
        stop_token_ids: EOS ids and the request's own, masked by the worker until ``min_tokens``
            are there.
    """

    request_id: str
    row: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    choice_index: int
    num_computed_tokens: int
    block_ids: BlockIds
    stop_token_ids: tuple[int, ...] = ()


class ResumedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A preempted request that runs again; the workers kept its tokens, only row and blocks are
    new.
    """

    request_id: str
    row: int
    num_computed_tokens: int
    block_ids: BlockIds


class AppendedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks added to the table of a row that was already running."""

    row: int
    block_ids: BlockIds


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Who runs how many tokens in one step, as a delta against the plans before it.

    A worker applies finished, preempted, resumed, new and appended in this order, then runs the
    scheduled rows. The last four columns are parallel, one entry per scheduled request: columns
    instead of a record per request keep the step at 256 requests within its time budget.

    Attributes:
        step_id: counts up from 0.
        finished_request_ids: their state can be dropped. Also named: requests aborted before
            they ran.
        preempted_request_ids: they leave their row and keep their tokens.
        request_ids: the scheduled requests.
        rows: their rows.
        num_scheduled_tokens: tokens to run, draft slots included; at least 1.
        num_draft_slots: how many of these may be drafts. The drafts themselves never leave the
            worker.
        payloads: opaque data per plugin, keyed ``kind/name``.
    """

    step_id: int
    finished_request_ids: tuple[str, ...] = ()
    preempted_request_ids: tuple[str, ...] = ()
    resumed_requests: tuple[ResumedRequest, ...] = ()
    new_requests: tuple[NewRequest, ...] = ()
    appended_blocks: tuple[AppendedBlocks, ...] = ()
    request_ids: list[str] = []
    rows: list[int] = []
    num_scheduled_tokens: list[int] = []
    num_draft_slots: list[int] = []
    payloads: dict[str, Any] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for a worker to do: no tokens, no ended or preempted requests,
        no payload.
        """
        return not (
            self.request_ids
            or self.finished_request_ids
            or self.preempted_request_ids
            or self.payloads
        )

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled over all requests."""
        return sum(self.num_scheduled_tokens)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token at one position, from the model's own distribution.

    Attributes:
        rank: 1 for the most likely token of the vocabulary.
        decoded: its text, filled in where the tokenizer is.
    """

    token_id: int
    logprob: float
    rank: int
    decoded: str | None = None


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one position: the token that stands there, and the most likely ones."""

    token: TokenLogprob
    top: list[TokenLogprob]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of a plan. Columns are parallel to ``StepPlan.request_ids``.

    Attributes:
        token_ids: new tokens: none while a prompt is still being computed, else accepted drafts
            plus one.
        num_drafts_used: draft tokens that were verified; fewer than the slots when a grammar
            cut them.
        num_draft_tokens_wanted: draft slots that the proposer could use in the next step.
        logprobs: by index into the columns, one entry per new token.
        prompt_logprobs: by index; one entry per prompt position whose *successor* was scored in
            this step.
        errors: by index; the request failed with this message, the others did not.
        error_fields: by index, for errors that are the request's own fault: the sampling parameter.
        timings_s: seconds by stage (``prepare``, ``forward``, ``sample``, ``draft``).
        num_requests_not_drafted: for how many there could be drafts in the next step, but there
            are none to be, as they don't pay.
    """

    step_id: int
    token_ids: list[list[int]] = []
    num_drafts_used: list[int] = []
    num_draft_tokens_wanted: list[int] = []
    logprobs: dict[int, list[PositionLogprobs]] = {}
    prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
    errors: dict[int, str] = {}
    timings_s: dict[str, float] = {}
    payloads: dict[str, Any] = {}
    error_fields: dict[int, str] = {}
    num_requests_not_drafted: int = 0


class StepRecord(msgspec.Struct, frozen=True):
    """One committed step, as observers see it.

    Attributes:
        num_prefill_tokens: tokens of requests that had not yet produced one; the rest are
            ``num_decode_tokens``.
        num_draft_tokens: drafts verified; ``num_accepted_tokens`` of them were kept.
        num_free_blocks: after the step.
        timings_s: seconds by stage, ``plan``, ``commit`` and the workers' own.
        num_drafts: requests that had drafts verified.
        drafted_per_position: how many of them had a draft at this place;
            ``accepted_per_position`` of these were kept.
        num_requests_not_drafted: for how many there could be drafts in the next step, but there
            are none to be, as they don't pay.
        num_prompt_tokens: of the prompts whose first token came in this step;
            ``num_cached_tokens`` of them were supplied by the prefix cache.
        first_token_times_s: of these requests, from arrival to the first token.
        inter_token_times_s: one per other request that got tokens, since it last got some.
    """

    step_id: int
    time_s: float
    request_ids: list[str]
    num_scheduled_tokens: list[int]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_new_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_free_blocks: int
    num_blocks: int
    timings_s: dict[str, float]
    num_drafts: int = 0
    drafted_per_position: list[int] = []
    accepted_per_position: list[int] = []
    num_requests_not_drafted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_times_s: list[float] = []
    inter_token_times_s: list[float] = []


class FinishedRequest(msgspec.Struct, frozen=True):
    """A request that ended, as observers see it.

    Attributes:
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        first_scheduled_time_s: when the first step that ran it began.
        num_draft_tokens: drafts verified for it; ``num_accepted_tokens`` were kept.
        max_tokens: the limit that it asked for.
        num_choices: the ``n`` of its prompt; ``choice_index`` is which of them it is.
        compiled_time_s: when its constraint was compiled, or refused; None without one.
    """

    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_time_s: float
    first_token_time_s: float | None
    last_token_time_s: float | None
    finish_time_s: float
    first_scheduled_time_s: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    max_tokens: int | None = None
    num_choices: int = 1
    choice_index: int = 0
    compiled_time_s: float | None = None
