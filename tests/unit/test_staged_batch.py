"""``StagedBatch`` gives a device what ``InputBatch`` gives the host, without waiting for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.api import AttentionBatch, NewRequest, SamplingParams, StepPlan
from hotshoe.api.types import AppendedBlocks
from hotshoe.testing.no_syncs import PretendGpu, PretendStreams
from hotshoe.worker.batch import InputBatch, StepInputs
from hotshoe.worker.staged_batch import StagedBatch

SIZES = {"max_num_seqs": 6, "max_model_len": 64, "block_size": 4, "num_groups": 2}


class Two:
    """A batch on the host, and one on a GPU that nobody may wait for, given the same plans.

    The one on the host learns its tokens at once, the other one step late.
    """

    def __init__(self) -> None:
        self.gpu = PretendGpu()
        self.host = InputBatch(**SIZES)
        with self.gpu:
            self.staged = StagedBatch(
                device=self.gpu.device, streams=PretendStreams(self.gpu), **SIZES
            )
        self._late: list[tuple[object, list[list[int]]]] = []

    def apply(self, plan: StepPlan) -> None:
        for batch in (self.host, self.staged):
            for new in plan.new_requests:
                batch.place(new.row, new.request_id, new.num_computed_tokens, new.block_ids)
                batch.start(new)
            for appended in plan.appended_blocks:
                batch.append_blocks(appended.row, appended.block_ids)

    def step(self, plan: StepPlan, token_ids: list[int]) -> tuple[StepInputs, StepInputs]:
        """Inputs of both.

        Args:
            plan: of the step.
            token_ids: that the requests which sample get.
        """
        self.apply(plan)
        on_host = self.host.prepare(plan)
        new = iter(token_ids)
        drawn = [[next(new)] if samples else [] for samples in on_host.samples]
        with self.gpu:
            inputs = self.staged.prepare(plan)
            placeholders = self.staged.expect(
                inputs, self.gpu.put(torch.tensor(token_ids, dtype=torch.int64))
            )
        while self._late:
            self.staged.settle(*self._late.pop())  # type: ignore[arg-type]
        self._late.append((placeholders, [ids for ids in drawn if ids]))
        self.host.advance(on_host, drawn)
        return on_host, inputs

    def seen(self, tensor: Tensor) -> list[int]:
        assert self.gpu.is_on(tensor)
        values: list[int] = self.gpu.get(tensor).tolist()
        return values


@pytest.fixture
def two() -> Two:
    return Two()


def new_request(row: int, prompt: list[int], blocks: Iterator[int]) -> NewRequest:
    ids = tuple(next(blocks) for _ in range(-(-len(prompt) // 4)))
    params = SamplingParams()
    return NewRequest(f"{row}-{ids[0]}", row, prompt, params, 0, 0, 0, (ids, ids[::-1]))


def check(two: Two, on_host: StepInputs, staged: StepInputs) -> None:
    """Everything that a model sees is the same."""
    assert two.seen(staged.token_ids) == on_host.token_ids.tolist()
    assert two.seen(staged.positions) == on_host.positions.tolist()
    assert two.seen(staged.logits_indices) == on_host.logits_indices.tolist()
    for mine, theirs in zip(staged.attention, on_host.attention, strict=True):
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "positions"):
            assert two.seen(getattr(mine, name)) == getattr(theirs, name).tolist(), name
        assert two.seen(mine.block_table) == theirs.block_table.tolist()
        for name in ("block_size", "max_query_len", "max_seq_len"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert list(mine.query_lens_list) == list(theirs.query_lens_list)
        assert list(mine.seq_lens_list) == list(theirs.seq_lens_list)


def test_random_steps_look_the_same_to_the_model(two: Two) -> None:
    numbers = random.Random(3)
    blocks = count(1)
    lengths: dict[int, int] = {}  # computed tokens by row
    known: dict[int, int] = {}
    capacity: dict[int, int] = {}
    for step_id in range(120):
        for row in [row for row in lengths if lengths[row] > 50 or numbers.random() < 0.05]:
            del lengths[row]
        new = []
        for row in range(6):
            if row not in lengths and numbers.random() < 0.4:
                prompt = [numbers.randrange(100) for _ in range(numbers.randint(1, 20))]
                new.append(new_request(row, prompt, blocks))
                lengths[row], known[row] = 0, len(prompt)
                capacity[row] = -(-len(prompt) // 4) * 4
        rows = [row for row in lengths if numbers.random() < 0.8]
        numbers.shuffle(rows)
        if not rows:
            continue
        appended = []
        counts = []
        for row in rows:
            counts.append(numbers.randint(1, known[row] - lengths[row]))
            lengths[row] += counts[-1]
            if lengths[row] > capacity[row]:
                block = next(blocks)
                appended.append(AppendedBlocks(row, ((block,), (block + 1000,))))
                capacity[row] += 4
        sampling = [row for row in rows if lengths[row] == known[row]]
        for row in sampling:
            known[row] += 1
        plan = StepPlan(
            step_id,
            new_requests=tuple(one for one in new if one.row in rows),
            appended_blocks=tuple(appended),
            request_ids=[str(row) for row in rows],
            rows=rows,
            num_scheduled_tokens=counts,
            num_draft_slots=[0] * len(rows),
        )
        two.apply(StepPlan(step_id, new_requests=tuple(one for one in new if one.row not in rows)))
        check(two, *two.step(plan, [numbers.randrange(100) for _ in sampling]))


def decode(rows: list[int]) -> StepPlan:
    ones = [1] * len(rows)
    zeros = [0] * len(rows)
    return StepPlan(
        1,
        request_ids=[f"{row}" for row in rows],
        rows=rows,
        num_scheduled_tokens=ones,
        num_draft_slots=zeros,
    )


def test_padding_has_neither_slots_nor_lengths(two: Two) -> None:
    blocks = count(1)
    new = tuple(new_request(row, [row + 1] * 5, blocks) for row in (4, 2, 3))
    plan = StepPlan(
        0,
        new_requests=new,
        request_ids=["4", "2", "3"],
        rows=[4, 2, 3],
        num_scheduled_tokens=[5] * 3,
        num_draft_slots=[0] * 3,
    )
    two.step(plan, [40, 20, 30])
    with two.gpu:
        inputs = two.staged.open_bucket(6)
        two.staged.open_bucket(4)
    assert two.seen(inputs.slot_mappings[1]) == [-1] * 6
    two.staged.buckets = [4, 6]

    on_host = two.host.prepare(decode([2, 3, 4]))
    with two.gpu:
        staged = two.staged.prepare(decode([2, 3, 4]))
        assert staged.bucket == 4
        batches = [two.staged.bucket_batch(4, group) for group in range(2)]
        ids = two.staged.filled(staged.token_ids, two.gpu.put(torch.tensor([2, 3, 4])))
    assert two.seen(ids) == on_host.token_ids.tolist() == [20, 30, 40]
    for mine, theirs in zip(batches, on_host.attention, strict=True):
        assert two.seen(mine.slot_mapping) == [*theirs.slot_mapping.tolist(), -1]
        assert two.seen(mine.seq_lens) == [6, 6, 6, 0]
        assert two.seen(mine.positions) == [5, 5, 5, 0]
        assert two.seen(mine.query_start_loc) == [0, 1, 2, 3, 4]
        width = theirs.block_table.shape[1]
        assert two.seen(mine.block_table[:3, :width]) == theirs.block_table.tolist()
        assert (mine.max_query_len, mine.max_seq_len) == (1, 64)


def test_step_in_which_a_prompt_goes_on_is_not_padded(two: Two) -> None:
    with two.gpu:
        two.staged.open_bucket(4)
    two.staged.buckets = [4]
    blocks = count(1)
    new = (new_request(0, [1], blocks), new_request(1, [1, 2, 3], blocks))
    plan = StepPlan(
        0,
        new_requests=new,
        request_ids=["0", "1"],
        rows=[0, 1],
        num_scheduled_tokens=[1, 1],
        num_draft_slots=[0, 0],
    )
    on_host, staged = two.step(plan, [7])
    assert staged.bucket is None
    check(two, on_host, staged)


def test_token_of_a_request_that_has_left_its_row_is_not_written(two: Two) -> None:
    blocks = count(1)
    plan = StepPlan(
        0,
        new_requests=(new_request(0, [1, 2, 3], blocks),),
        request_ids=["0"],
        rows=[0],
        num_scheduled_tokens=[3],
        num_draft_slots=[0],
    )
    with two.gpu:
        two.apply(plan)
        inputs = two.staged.prepare(plan)
        placeholders = two.staged.expect(inputs, two.gpu.put(torch.tensor([9])))
    two.staged.place(0, "other", 0, ((7, 8), (7, 8)))
    two.staged.restore(0, (np.array([4, 5, 6, 7, 8], np.int32), 5))
    two.staged.settle(placeholders, [[9]])
    assert two.staged.history(0).tolist() == [4, 5, 6, 7, 8]


def test_runs_of_positions_lie_on_the_device_too(two: Two) -> None:
    blocks = count(1)
    two.apply(StepPlan(0, new_requests=tuple(new_request(r, [1] * 20, blocks) for r in (1, 5))))
    rows, first, counts = np.array([5, 1]), np.array([3, 17]), np.array([2, 1])
    with two.gpu:
        two.staged.prepare(decode([1]))
        mine: AttentionBatch = two.staged.spans(rows, first, counts)
    theirs = two.host.spans(rows, first, counts)
    assert two.seen(mine.slot_mapping) == theirs.slot_mapping.tolist()
    assert two.seen(mine.block_table) == theirs.block_table.tolist()
    assert two.seen(mine.query_start_loc) == [0, 2, 3]
