"""``ModelRunner``: one worker's way from a plan to sampled tokens."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    EngineDeadError,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    Kernels,
    KVCacheSpec,
    LogitsProcessor,
    Model,
    NewRequest,
    Proposer,
    RequestError,
    Sampler,
    StepPlan,
    StepResult,
)
from hotshoe.api.layers import Attention, ForwardStep
from hotshoe.kv_cache.sizing import MemoryUse
from hotshoe.worker.batch import InputBatch, StepInputs, with_queries
from hotshoe.worker.bucket_recordings import BucketRecordings, bucket_sizes
from hotshoe.worker.device_memory import DeviceMemory, memory_for
from hotshoe.worker.draft_control import DraftControl
from hotshoe.worker.draft_forwards import DraftLayerParts, WorkerDraftForwards
from hotshoe.worker.drafting import Drafting
from hotshoe.worker.forced_drafts import MAX_FORCED_TOKENS, ForcedDrafts
from hotshoe.worker.grammar_compiler import Constraint, GrammarCompiler, GuidedDecodingParts
from hotshoe.worker.kv_memory import allocate_pages
from hotshoe.worker.largest_step import LargestStep
from hotshoe.worker.launched_steps import (
    FinishedStep,
    LaunchedStep,
    PendingStep,
    PromptScores,
)
from hotshoe.worker.recordings import ForwardRecordings, RecordedParts
from hotshoe.worker.sampling import (
    AcceptanceRule,
    SampledTokens,
    SamplingStep,
    StartedSampling,
    TokenSampler,
    score_prompt,
)
from hotshoe.worker.sampling.transfers import Transfers
from hotshoe.worker.staged_batch import StagedBatch
from hotshoe.worker.streams import streams_for

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# torch tells such errors from others since 2.8
_GpuFailedError: type[Exception] = getattr(torch, "AcceleratorError", EngineDeadError)

_MAX_LOGITS_ROWS = 256  # prompt logprobs are scored in pieces of so many positions


@dataclass(slots=True, kw_only=True)
class WorkerParts:
    """Everything that assembly puts into a worker.

    Attributes:
        acceptance: decides which drafts are kept; None = those that are drawn anyway.
        memory: of the GPU; None on a CPU.
    """

    model: Model
    kernels: Kernels
    attention: AttentionBackend
    attention_layers: Sequence[Attention]
    groups: Sequence[KVCacheSpec]
    sampler: Sampler
    logits_processors: Mapping[str, tuple[LogitsProcessor, bool]]
    proposer: Proposer | None
    draft_layers: Sequence[Attention]
    draft_parts: DraftLayerParts | None
    draft_forwards: WorkerDraftForwards | None
    draft_control: DraftControl
    acceptance: AcceptanceRule | None
    guided_decoding: GuidedDecodingParts
    device: torch.device
    memory: DeviceMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Sizes of a worker's arrays.

    Attributes:
        record: whether steps may be recorded; ``record_batch_sizes`` as in the config.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    record: bool = True
    record_batch_sizes: tuple[int, ...] | None = None


class ModelRunner:
    """Executes plans: applies their deltas, runs the model, samples, verifies and drafts.

    The whole token path lives here: grammars, masks, draws, verification and drafts never leave the
    worker.
    """

    def __init__(self, parts: WorkerParts, limits: WorkerLimits) -> None:
        self.parts = parts
        self.limits = limits
        proposer = parts.proposer
        is_jumping = parts.guided_decoding.jump_forward
        self._is_drafting = proposer is not None or is_jumping
        most_forced = MAX_FORCED_TOKENS if is_jumping else 0
        self._max_draft_tokens = proposer.max_draft_tokens if proposer else most_forced
        self._streams = streams_for(parts.device)
        self._transfers = Transfers(self._streams, parts.device)
        self._batch = self._make_batch()
        self._tokens = self._token_sampler(parts.sampler)
        self._caches: list[dict[str, Tensor]] = []
        self._recordings: ForwardRecordings | BucketRecordings | None = None
        self._pending: deque[PendingStep] = deque()
        self._done_s = 0.0  # when the tokens of the last step were there
        self._rows: dict[str, int] = {}
        self._requests: dict[str, NewRequest] = {}
        self._saved: dict[str, tuple[np.ndarray, int]] = {}
        self._compiler = GrammarCompiler(parts.guided_decoding)
        self._grammars: dict[int, Grammar] = {}
        self._grammar_backends: dict[int, GuidedDecodingBackend] = {}
        # matchers of requests that wait to start, or to resume
        self._parked_grammars: dict[str, Constraint] = {}
        self._captured = frozenset(proposer.requirements.hidden_state_layers if proposer else ())
        self._drafting = self._make_drafting(proposer) if proposer else None
        self._forced = ForcedDrafts(
            self._batch,
            self._grammars,
            max_draft_tokens=self._max_draft_tokens,
            max_model_len=limits.max_model_len,
        )

    def _make_batch(self) -> InputBatch:
        parts, limits = self.parts, self.limits
        sizes = {
            "max_num_seqs": limits.max_num_seqs,
            "max_model_len": limits.max_model_len,
            "block_size": limits.block_size,
            "num_groups": max(len(parts.groups), 1),
            "max_draft_tokens": self._max_draft_tokens,
        }
        # a CPU computes on the host's arrays, unless its kernels want their inputs in one place
        if parts.device.type == "cpu" and parts.kernels.capabilities.recording != "buckets":
            return InputBatch(**sizes)
        return StagedBatch(device=parts.device, streams=self._streams, **sizes)

    def _make_drafting(self, proposer: Proposer) -> Drafting:
        return Drafting(
            proposer,
            self.parts.draft_control,
            self.parts.draft_forwards,
            self._batch,
            vocab_size=self.parts.model.vocab_size,
            max_model_len=self.limits.max_model_len,
        )

    def _token_sampler(self, sampler: Sampler) -> TokenSampler:
        return TokenSampler(
            sampler=sampler,
            max_num_seqs=self.limits.max_num_seqs,
            vocab_size=self.parts.model.vocab_size,
            device=self.parts.device,
            logits_processors=self.parts.logits_processors,
            streams=self._streams,
            acceptance=self.parts.acceptance,
        )

    # -- control plane ----------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """A control-plane call by name."""
        # made here: kept in self it would be a cycle, and weights would outlive a closed engine
        calls: dict[str, Callable[..., Any]] = {
            "profile_memory": self.profile_memory,
            "allocate_kv_cache": self.allocate_kv_cache,
            "compile_grammar": self.compile_grammar,
            "use_sampler": self.use_sampler,
            "num_requests": self.num_requests,
            "num_stuck_compile_threads": self.num_stuck_compile_threads,
        }
        return calls[method](*args)

    @torch.inference_mode()
    def profile_memory(self) -> MemoryUse | None:
        """Run the largest step that there may be, and see how much of the GPU's memory is used
        then; None where the memory isn't a GPU's.

        Raises:
            DeviceMemoryError: if it isn't enough.
        """
        parts, limits, memory = self.parts, self.limits, self.parts.memory
        if memory is None:
            return None
        remedy = (
            f"lower scheduler.max_num_batched_tokens ({limits.max_num_batched_tokens!r}) or "
            f"scheduler.max_num_seqs ({limits.max_num_seqs!r})"
        )
        memory.watch()
        with memory_for("a step of as many tokens as there may be", remedy):
            LargestStep(
                model=parts.model,
                attention=parts.attention,
                groups=parts.groups,
                caches=self._allocate(parts.attention_layers, 1),
                hidden_state_layers=self._captured,
                tokens=self._tokens,
                device=parts.device,
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
            ).run()
        return memory.peak()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate every layer's pages, zeroed, as the attention backend lays them out, and record
        steps that are recorded at start-up.

        Raises:
            DeviceMemoryError: if there is not enough of it.
        """
        parts, remedy = self.parts, "lower cache.gpu_memory_utilization"
        with memory_for(
            f"{num_blocks} KV blocks", f"{remedy}, cache.memory_gb or cache.num_blocks"
        ):
            self._caches = self._allocate(parts.attention_layers, num_blocks)
            drafter_caches = self._allocate(parts.draft_layers, num_blocks)
        with memory_for(
            "recorded steps",
            f"{remedy}, name fewer or smaller kernels.record_batch_sizes, or set kernels.record "
            "to false",
        ):
            self._recordings = self._make_recordings()
        if parts.draft_forwards is not None and parts.draft_parts is not None:
            parts.draft_forwards.bind(
                parts.draft_parts,
                drafter_caches,
                self._batch,
                device=parts.device,
                record=self.limits.record,
            )

    def _allocate(self, layers: Sequence[Attention], num_blocks: int) -> list[dict[str, Tensor]]:
        layouts = [self.parts.attention.layout(layer.spec) for layer in layers]
        return allocate_pages(layouts, num_blocks, self.parts.device)

    def _make_recordings(self) -> ForwardRecordings | BucketRecordings | None:
        parts, limits, batch = self.parts, self.limits, self._batch
        capabilities = parts.attention.capabilities
        recording = parts.kernels.capabilities.recording
        if limits.record_batch_sizes is not None and recording != "buckets":
            name = type(parts.kernels).__name__
            logger.warning("kernels.record_batch_sizes has no effect on %s", name)
        if not limits.record or recording == "none":
            return None
        is_padded = isinstance(batch, StagedBatch)
        if not capabilities.is_recordable or (is_padded and not capabilities.takes_padding):
            name = type(parts.attention).__name__
            lacks = "takes no padding" if capabilities.is_recordable else "can't be recorded"
            logger.info("forward passes are run op by op, not recorded: %s %s", name, lacks)
            return None
        recorded = RecordedParts(
            model=parts.model,
            kernels=parts.kernels,
            attention=parts.attention,
            groups=parts.groups,
            hidden_state_layers=self._captured,
        )
        if isinstance(batch, StagedBatch):
            recordings = BucketRecordings(recorded, self._caches, batch)
            recordings.record(bucket_sizes(limits.record_batch_sizes, limits.max_num_seqs))
            return recordings
        return ForwardRecordings(
            recorded,
            self._caches,
            batch,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )

    def compile_grammar(
        self, request_id: str, spec: GrammarSpec, backend: str | None = None
    ) -> None:
        """Compile the constraint of a request, which takes the matcher when it starts.

        Called in other threads than ``execute``. A plan that names the request as finished, also
        one that never ran, lets go of the matcher.

        Raises:
            RequestError: if it is malformed, or the backend can't enforce all of it.
            CompilersBusyError: if no thread is free to compile it.
        """
        self._parked_grammars[request_id] = self._compiler.constraint(spec, backend)

    def use_sampler(self, sampler: Sampler) -> None:
        """Replace the sampler while no request is alive."""
        if self._requests:
            raise RequestError(
                f"{len(self._requests)} requests are alive; the sampler can't change now"
            )
        self.parts.sampler = sampler
        self._tokens = self._token_sampler(sampler)

    def num_requests(self) -> int:
        """Requests that anything is kept for."""
        kept = (self._requests, self._rows, self._saved, self._parked_grammars)
        return len(set().union(*kept))

    def num_stuck_compile_threads(self) -> int:
        """Threads that still compile a constraint that was given up."""
        return self._compiler.num_stuck

    def close(self) -> None:
        """Free the caches, and what refers to them."""
        self._pending.clear()
        self._recordings = None
        self._caches = []
        if self.parts.draft_forwards is not None:
            self.parts.draft_forwards.close()

    # -- a step -----------------------------------------------------------------------------

    @property
    def max_in_flight(self) -> int:
        """How many steps are best launched before the first has its result: what drafts has to see
        the tokens of each step, and a CPU doesn't compute while Python runs.
        """
        return 1 if self.parts.device.type == "cpu" or self._is_drafting else 2

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its sampled tokens."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> FinishedStep | PendingStep:
        """Start a step, and go on without its tokens where the next steps can do so, too.

        Raises:
            EngineDeadError: if the GPU has failed.
        """
        try:
            return self._launch(plan)
        except _GpuFailedError as error:
            if _lacks_memory(error):
                raise
            raise _dead(error) from error

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> FinishedStep | PendingStep:
        started = perf_counter()
        if self._pending and self._needs_tokens(plan):
            self._finish_all()
        self._apply(plan)
        if not plan.request_ids:
            return FinishedStep(StepResult(plan.step_id))
        batch = self._batch
        inputs = batch.prepare(plan, self._trim_drafts if self._grammars else None)
        prepared = perf_counter()
        replayed = self._replay(plan, inputs)
        scored: dict[int, list[PromptScores]] = {}
        hidden_states: Mapping[int, Tensor]
        if replayed is not None:
            logits, hidden_states = replayed
        else:
            step = self._forward_step(plan, inputs)
            hidden = self.parts.model.forward(inputs.token_ids, inputs.positions, step)
            logits = self._logits(hidden, inputs)
            scored = self._prompt_logprobs(plan, inputs, hidden)
            hidden_states = step.hidden_states
        computed = perf_counter()
        sampled, sampling = self._start_sampling(plan, inputs, logits)
        times = started, prepared, computed
        if not isinstance(batch, StagedBatch) or self._is_drafting:
            launched = LaunchedStep(plan, inputs, sampled, sampling, hidden_states, scored, times)
            return FinishedStep(self._complete(launched))
        placeholders = batch.expect(inputs, None if sampling is None else sampling.token_ids)
        launched = LaunchedStep(plan, inputs, sampled, sampling, {}, scored, times, placeholders)
        pending = PendingStep(self, launched)
        self._pending.append(pending)
        return pending

    def _replay(
        self, plan: StepPlan, inputs: StepInputs
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Logits and hidden states of a recorded step."""
        if self._recordings is None or self._scores_prompts(plan, inputs):
            return None
        return self._recordings.run(inputs)

    def _needs_tokens(self, plan: StepPlan) -> bool:
        """Whether a plan can't be launched while tokens of the steps before are unknown."""
        # asked before the plan is applied: who is new on a row has all its tokens
        return bool(plan.preempted_request_ids) or self._tokens.needs_history(plan.rows)

    def _finish_all(self) -> None:
        while self._pending:
            self._finish_next()

    def finish_until(self, step: PendingStep) -> None:
        """Finish a step, and before it all that were launched before it."""
        while step.launched is not None:
            self._finish_next()

    @torch.inference_mode()
    def _finish_next(self) -> None:
        pending = self._pending.popleft()
        assert pending.launched is not None
        try:
            pending.settle(self._complete(pending.launched), None)
        except Exception as error:
            is_dead = isinstance(error, _GpuFailedError) and not _lacks_memory(error)
            # not of the step that is launched meanwhile, but of this one
            pending.settle(None, _dead(error) if is_dead else error)

    def _complete(self, step: LaunchedStep) -> StepResult:
        """Take over the tokens of a step, and draft on."""
        plan, inputs = step.plan, step.inputs
        started, prepared, computed = step.times_s
        prepare_s, forward_s = prepared - started, computed - prepared
        new_token_ids: list[list[int]] = [[] for _ in plan.request_ids]
        if step.sampling is None:
            tokens = SampledTokens(token_ids=[])
        else:
            tokens = step.sampling.finish()
            for index, token_ids in zip(step.sampled, tokens.token_ids, strict=True):
                new_token_ids[index] = token_ids
        batch = self._batch
        if step.placeholders is None:
            batch.advance(inputs, new_token_ids)
        else:
            assert isinstance(batch, StagedBatch)
            batch.settle(step.placeholders, tokens.token_ids)
            # while it waited behind the step before, the time was that one's
            started, computed = max(started, self._done_s), max(computed, self._done_s)
        self._done_s = done = perf_counter()
        wanted = self._draft(plan, inputs, step.hidden_states, new_token_ids, done - started)
        ended = perf_counter()
        return StepResult(
            plan.step_id,
            token_ids=new_token_ids,
            num_drafts_used=[len(drafts) for drafts in inputs.drafts],
            num_draft_tokens_wanted=wanted,
            logprobs=_by_column(tokens.logprobs, step.sampled),
            prompt_logprobs={
                index: [entry for piece in pieces for entry in piece.entries()]
                for index, pieces in step.scored.items()
            }
            if step.scored
            else {},
            errors=_by_column(tokens.errors, step.sampled),
            error_fields=_by_column(tokens.error_fields, step.sampled),
            num_requests_not_drafted=self._drafting.num_off if self._drafting else 0,
            timings_s={
                "prepare": prepare_s,
                "forward": forward_s,
                "sample": done - computed,
                "draft": ended - done,
                "total": ended - started,
            },
        )

    def _apply(self, plan: StepPlan) -> None:
        batch = self._batch
        if plan.finished_request_ids:
            self._finish(plan.finished_request_ids)
        for request_id in plan.preempted_request_ids:
            row = self._rows.pop(request_id)
            self._saved[request_id] = batch.save(row)
            if row in self._grammars:
                constraint = Constraint(self._grammars[row], self._grammar_backends[row])
                self._parked_grammars[request_id] = constraint
            self._leave(row)
        for resumed in plan.resumed_requests:
            batch.place(
                resumed.row, resumed.request_id, resumed.num_computed_tokens, resumed.block_ids
            )
            batch.restore(resumed.row, self._saved.pop(resumed.request_id))
            self._enter(resumed.row, self._requests[resumed.request_id])
        for new in plan.new_requests:
            batch.place(new.row, new.request_id, new.num_computed_tokens, new.block_ids)
            batch.start(new)
            self._requests[new.request_id] = new
            self._enter(new.row, new)
        for appended in plan.appended_blocks:
            batch.append_blocks(appended.row, appended.block_ids)

    def _finish(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._saved.pop(request_id, None)
            self._parked_grammars.pop(request_id, None)
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._batch.request_ids[row] = None
                self._leave(row)
        if self._drafting is not None:
            self._drafting.finish(request_ids)

    def _leave(self, row: int) -> None:
        self._tokens.remove_row(row)
        self._grammars.pop(row, None)
        self._grammar_backends.pop(row, None)

    def _enter(self, row: int, request: NewRequest) -> None:
        self._rows[request.request_id] = row
        if self._drafting is not None:
            self._drafting.enter(row, request.request_id)
        self._tokens.add_row(row, request)
        if request.sampling_params.structured_outputs is not None:
            constraint = self._parked_grammars.pop(request.request_id)
            self._grammars[row] = constraint.grammar
            self._grammar_backends[row] = constraint.backend

    def _trim_drafts(self, row: int, drafts: list[int]) -> list[int]:
        grammar = self._grammars.get(row)
        if grammar is None:
            return drafts
        return drafts[: grammar.validate(drafts) + self._tokens.verifies_refused_drafts]

    def _forward_step(self, plan: StepPlan, inputs: StepInputs) -> ForwardStep:
        backend = self.parts.attention
        metadata = [
            backend.build_metadata(inputs.attention[index], group)
            for index, group in enumerate(self.parts.groups)
        ]
        wanted_rows, wanted_metadata = self._wanted_rows(plan, inputs), None
        if wanted_rows is not None and backend.capabilities.takes_fewer_queries:
            wanted_metadata = partial(self._wanted_metadata, inputs)
        return ForwardStep(metadata, self._caches, self._captured, wanted_rows, wanted_metadata)

    def _wanted_rows(self, plan: StepPlan, inputs: StepInputs) -> Tensor | None:
        """Those that logits are computed of, if these are not all."""
        is_all = len(inputs.logits_indices) == len(inputs.token_ids)
        return None if is_all or self._scores_prompts(plan, inputs) else inputs.logits_indices

    def _scores_prompts(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether logits of prompts' own tokens may be looked at, too."""
        return len(inputs.logits_indices) < len(inputs.token_ids) and any(
            self._requests[one].sampling_params.prompt_logprobs is not None
            for one in plan.request_ids
        )

    def _wanted_metadata(self, inputs: StepInputs, group: int) -> Any:
        batch = with_queries(inputs.attention[group], inputs.num_wanted, self._transfers.stage)
        return self.parts.attention.build_metadata(batch, self.parts.groups[group])

    def _logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        indices = inputs.logits_indices
        if indices.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, indices)
        return self.parts.model.compute_logits(hidden)

    def _start_sampling(
        self, plan: StepPlan, inputs: StepInputs, logits: Tensor
    ) -> tuple[list[int], StartedSampling | None]:
        """Indices in the plan's columns of the requests that sample, and their sampling."""
        index_of = inputs.samples.nonzero()[0].tolist()
        if len(index_of) == len(plan.rows):
            rows, ids, drafts = plan.rows, plan.request_ids, inputs.drafts
        else:
            rows = [plan.rows[index] for index in index_of]
            ids = [plan.request_ids[index] for index in index_of]
            drafts = [inputs.drafts[index] for index in index_of]
        if not rows:
            return [], None
        batch = self._batch
        step = SamplingStep(
            rows=rows,
            request_ids=ids,
            draft_token_ids=drafts,
            logits=logits,
            token_ids=batch.token_ids,
            num_tokens=batch.num_tokens,
            num_prompt_tokens=batch.num_prompt_tokens,
            grammars=self._grammars,
            grammar_backends=self._grammar_backends,
        )
        return index_of, self._tokens.start(step)

    def _prompt_logprobs(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor
    ) -> dict[int, list[PromptScores]]:
        """By plan index: scores of the prompt tokens that follow the positions computed in this
        step.
        """
        scored: dict[int, list[PromptScores]] = {}
        for index, request_id in enumerate(plan.request_ids):
            num_top = self._requests[request_id].sampling_params.prompt_logprobs
            if num_top is None:
                continue
            row = plan.rows[index]
            first = int(self._batch.num_computed_tokens[row])
            last = min(
                first + int(inputs.num_tokens[index]), int(self._batch.num_prompt_tokens[row]) - 1
            )
            if first < last:
                start = int(inputs.query_start_loc[index])
                states = hidden[start : start + last - first]
                targets = self._batch.token_ids[row, first + 1 : last + 1]
                scored[index] = self._score(states, targets, num_top)
        return scored

    def _score(self, states: Tensor, targets: np.ndarray, num_top: int) -> list[PromptScores]:
        pieces = []
        for start in range(0, len(targets), _MAX_LOGITS_ROWS):
            piece = slice(start, start + _MAX_LOGITS_ROWS)
            logits = self.parts.model.compute_logits(states[piece])
            token_ids = self._transfers.stage(targets[piece].astype(np.int64))
            scores = score_prompt(logits, token_ids, num_top)
            pieces.append(PromptScores(scores, self._transfers.copy_out(scores.tensors)))
        return pieces

    def _draft(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        hidden_states: Mapping[int, Tensor],
        new_token_ids: Sequence[Sequence[int]],
        step_time_s: float,
    ) -> list[int]:
        """Per request, drafts for the next step; they stay here."""
        num_drafts = [0] * len(plan.rows)
        if self._drafting is not None:
            num_drafts = self._drafting.run(
                plan,
                inputs,
                hidden_states,
                new_token_ids,
                step_time_s,
                lambda: self._tokens.draft_draws(plan.rows, self._batch.num_tokens),
            )
        if self._grammars and self.parts.guided_decoding.jump_forward:
            self._forced.add(plan.rows, new_token_ids, num_drafts)
        return num_drafts


def _dead(error: Exception) -> EngineDeadError:
    """A GPU that has failed computes nothing any more for the process that it failed in."""
    first_line = str(error).partition("\n")[0]
    return EngineDeadError(f"the GPU failed, start a new process: {first_line}")


def _lacks_memory(error: Exception) -> bool:
    """Whether the GPU only has no memory for a step: it goes on with others."""
    return "CUDA error: out of memory" in str(error)


def _by_column(found: dict[int, _T], sampled: Sequence[int]) -> dict[int, _T]:
    """What was found by index among the requests that sample, by index in the plan's columns."""
    return {sampled[at]: one for at, one in found.items()} if found else found
