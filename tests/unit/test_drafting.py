"""What comes after a step, with a real proposer: whose drafts are counted as a drafter's."""

from __future__ import annotations

from collections.abc import Sequence

from hotshoe.api import NewRequest, SamplingParams, StepPlan
from hotshoe.worker.batch import InputBatch
from hotshoe.worker.draft_control import DraftControl, StepOutcome
from hotshoe.worker.drafting import Drafting
from hotshoe_spec_decode.ngram import NgramOptions, NgramProposer

PROMPT = [5, 6, 7, 8] * 4


class Recorder(DraftControl):
    def __init__(self) -> None:
        super().__init__()
        self.num_drafted: list[int] = []

    def rest(
        self, rows: Sequence[int], new_token_ids: Sequence[Sequence[int]], seconds: float
    ) -> bool:
        return True

    def ask(self, outcome: StepOutcome, room: Sequence[int]) -> Sequence[int]:
        self.num_drafted += outcome.num_drafted
        return [3]


def test_drafts_from_elsewhere_are_looked_into_and_not_counted() -> None:
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "block_size": 16}
    batch, control = InputBatch(**sizes, num_groups=1, max_draft_tokens=8), Recorder()
    drafting = Drafting(
        NgramProposer(NgramOptions(num_draft_tokens=8)),
        control,
        None,
        batch,
        vocab_size=50,
        max_model_len=64,
    )
    drafting.enter(0, "one")
    new = NewRequest(
        request_id="one",
        row=0,
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(),
        seed=0,
        choice_index=0,
        num_computed_tokens=0,
        block_ids=(tuple(range(4)),),
    )
    batch.place(0, "one", 0, new.block_ids)
    batch.start(new)

    def step(num_tokens: int, num_slots: int, tokens: list[int]) -> list[int]:
        plan = StepPlan(
            0,
            request_ids=["one"],
            rows=[0],
            num_scheduled_tokens=[num_tokens + num_slots],
            num_draft_slots=[num_slots],
        )
        inputs = batch.prepare(plan)
        batch.advance(inputs, [tokens])
        return drafting.run(plan, inputs, {}, [tokens], 0.01, lambda: None)

    assert step(len(PROMPT), 0, [5]) == [0]  # it rests
    batch.drafts[0] = [6, 7]
    assert step(1, 2, [6, 7, 8]) == [3]  # what others draft wakes it
    assert control.num_drafted == [0]
    assert step(1, 3, [5, 6, 7, 8]) == [3]
    assert control.num_drafted == [0, 3]
