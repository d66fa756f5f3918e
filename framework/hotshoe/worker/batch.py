"""The worker's view of the batch: plans applied to persistent arrays, and a step's inputs gathered
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import AttentionBatch, BlockIds, NewRequest, StepPlan

TrimDrafts = Callable[[int, list[int]], list[int]]


@dataclass(slots=True)
class Packed:
    """Runs of positions of some rows, one behind another.

    Attributes:
        rows: ``[num_reqs]``.
        num_tokens: ``[num_reqs]``, of each run, drafts that are really used included.
        token_rows: ``[num_tokens]``, the row of each token.
        positions: ``[num_tokens]``.
        seq_lens: ``[num_reqs]``, the end of each run.
        query_start_loc: ``[num_reqs + 1]`` int32; everything else is int64.
    """

    rows: np.ndarray
    num_tokens: np.ndarray
    token_rows: np.ndarray
    positions: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray


@dataclass(kw_only=True)
class StepInputs:
    """One step, ready for the model.

    Attributes:
        packed: the scheduled requests with their tokens.
        drafts: per request the drafts that are verified; mostly empty.
        samples: ``[num_reqs]`` bool; whether the request gets new tokens in this step.
        logits_indices: ``[num_logits]`` int64 positions in the packed batch whose logits are
            needed.
        token_ids: ``[num_tokens]`` int64, where the model runs; so are the tensors below.
        make_attention: makes ``attention``, which a recorded step doesn't need.
        bucket: the size of a recorded step that these inputs were written for; None: of no such.
    """

    packed: Packed
    drafts: list[list[int]]
    samples: np.ndarray
    token_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    make_attention: Callable[[], tuple[AttentionBatch, ...]]
    bucket: int | None = None

    @property
    def rows(self) -> np.ndarray:
        """``[num_reqs]`` batch rows of the scheduled requests."""
        return self.packed.rows

    @property
    def num_tokens(self) -> np.ndarray:
        """``[num_reqs]`` tokens each runs."""
        return self.packed.num_tokens

    @property
    def query_start_loc(self) -> np.ndarray:
        """``[num_reqs + 1]`` int32."""
        return self.packed.query_start_loc

    @property
    def num_wanted(self) -> list[int]:
        """``[num_reqs]`` tokens of each whose logits are needed: its last ones."""
        return [
            len(drafts) + 1 if samples else 0
            for samples, drafts in zip(self.samples.tolist(), self.drafts, strict=True)
        ]

    @cached_property
    def attention(self) -> tuple[AttentionBatch, ...]:
        """By cache group."""
        return self.make_attention()


class InputBatch:
    """Per-row arrays that live as long as the worker.

    Attributes:
        token_ids: ``[max_num_seqs, max_model_len + 1]`` int32: prompt and output, then drafts
            being verified.
        num_tokens: ``[max_num_seqs]`` int64 known tokens.
        num_prompt_tokens: ``[max_num_seqs]`` int64.
        num_computed_tokens: ``[max_num_seqs]`` int64 tokens whose KV is in the cache.
        drafts: per row the drafts offered for its next step.
        request_ids: per row, None = free.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        max_draft_tokens: int = 0,
    ) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len + max_draft_tokens + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.drafts: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.request_ids: list[str | None] = [None] * max_num_seqs
        max_blocks = -(-(max_model_len + max_draft_tokens + 1) // block_size) + 1
        shape = (max_num_seqs, max_blocks)
        self.block_tables = tuple(np.zeros(shape, np.int32) for _ in range(num_groups))
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self._arange = np.arange(1024, dtype=np.int64)

    # -- deltas ---------------------------------------------------------------------------

    def place(
        self, row: int, request_id: str, num_computed_tokens: int, block_ids: BlockIds
    ) -> None:
        """Give a row to a request and set its block tables."""
        self.request_ids[row] = request_id
        self.num_computed_tokens[row] = num_computed_tokens
        self.drafts[row] = []
        self.num_blocks[row] = 0
        self.append_blocks(row, block_ids)

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        """Extend a row's block tables."""
        start = int(self.num_blocks[row])
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table[row, start : start + len(ids)] = ids
            self.num_blocks[row] = start + len(ids)

    def start(self, request: NewRequest) -> None:
        """Write the prompt of a request that was just placed."""
        count = len(request.prompt_token_ids)
        self.token_ids[request.row, :count] = request.prompt_token_ids
        self.num_tokens[request.row] = self.num_prompt_tokens[request.row] = count

    def save(self, row: int) -> tuple[np.ndarray, int]:
        """A preempted request's tokens and prompt length, to restore it later."""
        self.request_ids[row] = None
        return self.token_ids[row, : self.num_tokens[row]].copy(), int(self.num_prompt_tokens[row])

    def restore(self, row: int, saved: tuple[np.ndarray, int]) -> None:
        """Write back what ``save`` returned."""
        tokens, num_prompt_tokens = saved
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_prompt_tokens[row] = num_prompt_tokens

    def history(self, row: int) -> np.ndarray:
        """``[num_tokens]`` int32 view of a row's known tokens."""
        return self.token_ids[row, : self.num_tokens[row]]

    # -- a step -----------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, trim_drafts: TrimDrafts | None = None) -> StepInputs:
        """Gather the inputs of the scheduled rows; drafts are written behind each row's known
        tokens.

        Args:
            plan: already applied.
            trim_drafts: ``(row, drafts) -> drafts`` cut before verification, as by a grammar.
        """
        rows = np.array(plan.rows, np.int64)
        num_tokens = np.array(plan.num_scheduled_tokens, np.int64)
        drafts = self._use_drafts(plan, num_tokens, trim_drafts)
        computed = self.num_computed_tokens[rows]
        seq_lens = computed + num_tokens
        query_start_loc = np.zeros(len(rows) + 1, np.int64)
        num_tokens.cumsum(out=query_start_loc[1:])
        samples = seq_lens >= self.num_tokens[rows]
        if len(rows) == query_start_loc[-1]:
            token_rows, positions = rows, computed
            (indices,) = samples.nonzero()
        else:
            token_rows, positions = self._packed(rows, computed, num_tokens, query_start_loc)
            indices = _logits_indices(samples, drafts, query_start_loc)
        start_loc = query_start_loc.astype(np.int32)
        packed = Packed(rows, num_tokens, token_rows, positions, seq_lens, start_loc)
        return self._inputs(packed, drafts, samples, indices)

    def _inputs(
        self, packed: Packed, drafts: list[list[int]], samples: np.ndarray, indices: np.ndarray
    ) -> StepInputs:
        ids = self.token_ids[packed.token_rows, packed.positions]
        return StepInputs(
            packed=packed,
            drafts=drafts,
            samples=samples,
            token_ids=torch.from_numpy(ids.astype(np.int64)),
            positions=torch.from_numpy(packed.positions),
            logits_indices=torch.from_numpy(indices),
            make_attention=partial(self._attention, packed),
        )

    def _use_drafts(
        self, plan: StepPlan, num_tokens: np.ndarray, trim_drafts: TrimDrafts | None
    ) -> list[list[int]]:
        if not any(plan.num_draft_slots):
            return [[] for _ in plan.rows]
        used: list[list[int]] = []
        for index, (row, slots) in enumerate(zip(plan.rows, plan.num_draft_slots, strict=True)):
            drafts = self.drafts[row][:slots] if slots else []
            if drafts and trim_drafts is not None:
                drafts = trim_drafts(row, drafts)
            num_tokens[index] -= slots - len(drafts)
            if drafts:
                start = self.num_tokens[row]
                self.token_ids[row, start : start + len(drafts)] = drafts
            used.append(drafts)
        return used

    def _packed(
        self, rows: np.ndarray, computed: np.ndarray, num_tokens: np.ndarray, start_loc: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        total = int(start_loc[-1])
        if total > len(self._arange):
            self._arange = np.arange(2 * total, dtype=np.int64)
        positions = self._arange[:total] + np.repeat(computed - start_loc[:-1], num_tokens)
        return np.repeat(rows, num_tokens), positions

    def spans(
        self, rows: np.ndarray, first_positions: np.ndarray, num_tokens: np.ndarray
    ) -> AttentionBatch:
        """The batch of runs of positions, one run a row, in the first cache group."""
        start_loc = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(num_tokens, out=start_loc[1:])
        if len(rows) == start_loc[-1]:
            token_rows, positions = rows, first_positions
        else:
            token_rows, positions = self._packed(rows, first_positions, num_tokens, start_loc)
        seq_lens = first_positions + num_tokens
        start_loc = start_loc.astype(np.int32)
        packed = Packed(rows, num_tokens, token_rows, positions, seq_lens, start_loc)
        return self._attention(packed)[0]

    def _attention(self, packed: Packed) -> tuple[AttentionBatch, ...]:
        num_tokens, seq_lens = packed.num_tokens, packed.seq_lens
        query_start_loc = torch.from_numpy(packed.query_start_loc)
        lengths = torch.from_numpy(seq_lens.astype(np.int32))
        places = torch.from_numpy(packed.positions)
        return tuple(
            AttentionBatch(
                query_start_loc=query_start_loc,
                seq_lens=lengths,
                block_table=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(slots),
                positions=places,
                block_size=self.block_size,
                max_query_len=int(num_tokens.max(initial=0)),
                max_seq_len=int(seq_lens.max(initial=0)),
                query_lens_list=num_tokens.tolist(),
                seq_lens_list=seq_lens.tolist(),
            )
            for table, slots in zip(self.tables_of(packed), self.slots_of(packed), strict=True)
        )

    def tables_of(self, packed: Packed) -> list[np.ndarray]:
        """By cache group, ``[num_reqs, max_blocks]`` int32: as many blocks as the longest has."""
        max_blocks = -(-int(packed.seq_lens.max(initial=0)) // self.block_size)
        return [table[packed.rows, :max_blocks] for table in self.block_tables]

    def slots_of(self, packed: Packed) -> list[np.ndarray]:
        """By cache group, ``[num_tokens]`` int64."""
        block_index, offset = np.divmod(packed.positions, self.block_size)
        return [
            table[packed.token_rows, block_index].astype(np.int64) * self.block_size + offset
            for table in self.block_tables
        ]

    def advance(self, inputs: StepInputs, new_token_ids: Sequence[Sequence[int]]) -> None:
        """Take over a step's outcome.

        Args:
            inputs: of the step.
            new_token_ids: per scheduled request, empty if it got none; rejected drafts are
                forgotten by this.
        """
        rows = inputs.rows
        self.num_computed_tokens[rows] += inputs.num_tokens
        for index, (row, tokens) in enumerate(zip(rows.tolist(), new_token_ids, strict=True)):
            if not tokens:
                continue
            start = self.num_tokens[row]
            if len(tokens) == 1:
                self.token_ids[row, start] = tokens[0]
            else:
                self.token_ids[row, start : start + len(tokens)] = tokens
            self.num_tokens[row] = start + len(tokens)
            drafts = inputs.drafts[index]
            if drafts:
                self.num_computed_tokens[row] -= len(drafts) - (len(tokens) - 1)


def with_queries(
    batch: AttentionBatch, num_queries: Sequence[int], stage: Callable[[np.ndarray], Tensor]
) -> AttentionBatch:
    """The same tokens, of which only some are queries: so many of each request, its last ones.

    Args:
        batch: for a backend that ``takes_fewer_queries``.
        num_queries: by request.
        stage: puts an array where the model runs.
    """
    starts = np.zeros(len(num_queries) + 1, np.int32)
    np.cumsum(num_queries, out=starts[1:])
    return replace(
        batch,
        query_start_loc=stage(starts),
        max_query_len=max(num_queries, default=0),
        query_lens_list=num_queries,
    )


def last_rows(num_tokens: Sequence[int], num_wanted: Sequence[int]) -> np.ndarray:
    """Where the last tokens of packed runs are: so many of each, ``[sum(num_wanted)]`` int64."""
    counts = np.array(num_wanted, np.int64)
    return _runs(np.cumsum(np.array(num_tokens, np.int64)) - counts, counts)


def _logits_indices(
    samples: np.ndarray, drafts: list[list[int]], start_loc: np.ndarray
) -> np.ndarray:
    """The last ``1 + drafts`` positions of every request that samples."""
    sampling = np.flatnonzero(samples)
    ends = start_loc[1:][sampling]
    counts = np.array([len(drafts[index]) + 1 for index in sampling], np.int64)
    if counts.sum() == len(sampling):
        return ends - 1
    return _runs(ends - counts, counts)


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``counts[i]`` numbers from ``starts[i]`` on, one run behind another."""
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    runs: np.ndarray = np.repeat(starts, counts) + offsets
    return runs
