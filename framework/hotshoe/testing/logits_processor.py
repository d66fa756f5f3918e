"""The conformance suite of the logits-processor contract. Subclass it, name your component, and run
it with pytest.

    class TestMyProcessor(LogitsProcessorConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import Component, LogitsBatch, LogitsProcessor, LogitsProcessorContext


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    Attributes:
        logits: ``[V]`` float32.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logits: Tensor


class LogitsProcessorConformance:
    """What the core relies on: with it, drafts, preemption and the requests beside it can't change
    what a request gets. About a tenth of a second.

    Attributes:
        options: under ``sampler.logits_processors.<n>.options``.
        extra_args: ``SamplingParams.extra_args`` of every request.
        vocab_size: width of the logits.
    """

    options: ClassVar[dict[str, Any]] = {}
    extra_args: ClassVar[dict[str, Any] | None] = None
    vocab_size: ClassVar[int] = 50

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def processor(self) -> LogitsProcessor:
        """A fresh processor."""
        component = self.component()
        context = LogitsProcessorContext(device=torch.device("cpu"), vocab_size=self.vocab_size)
        return cast(LogitsProcessor, component.factory(component.options(**self.options), context))

    def rows(self) -> list[Row]:
        """Requests whose histories are repetitive, random, short and empty; the first with three
        drafts, so that it has four rows. Some tokens of each row are masked.
        """
        numbers = np.random.default_rng(0)
        pattern = numbers.integers(0, self.vocab_size, 5).tolist()
        outputs = [
            *(pattern * 3 + pattern[:num_drafts] for num_drafts in range(4)),
            numbers.integers(0, self.vocab_size, 40).tolist(),
            [3] * 12,
            [7],
            [],
        ]
        logits = torch.from_numpy(numbers.normal(size=(len(outputs), self.vocab_size)) * 3).float()
        logits[torch.from_numpy(numbers.random(logits.shape) < 0.2)] = -torch.inf
        logits[:, 0] = 0.5
        return [
            Row(f"request-{max(index - 3, 0)}", [1, 2, *pattern], output, logits[index])
            for index, output in enumerate(outputs)
        ]

    def batch(self, rows: Sequence[Row]) -> LogitsBatch:
        """The record that a processor gets for some rows; its logits are a copy."""
        prompts = [np.array(row.prompt_token_ids, dtype=np.int32) for row in rows]
        outputs = [np.array(row.output_token_ids, dtype=np.int32) for row in rows]
        for history in [*prompts, *outputs]:
            history.flags.writeable = False
        return LogitsBatch(
            logits=torch.stack([row.logits for row in rows]),
            request_ids=[row.request_id for row in rows],
            prompt_token_ids=prompts,
            output_token_ids=outputs,
            extra_args=[self.extra_args] * len(rows),
        )

    def processed(self, rows: Sequence[Row], processor: LogitsProcessor | None = None) -> Tensor:
        """What a processor, a fresh one by default, makes of the logits of some rows."""
        batch = self.batch(rows)
        (processor or self.processor()).apply(batch)
        return batch.logits

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "logits_processor/0"

    def test_logits_stay_numbers_and_leave_a_token_to_choose(self) -> None:
        logits = self.processed(self.rows())
        assert not logits.isnan().any()
        assert not (logits == torch.inf).any()
        assert (logits > -torch.inf).any(-1).all()

    def test_a_masked_token_stays_masked(self) -> None:
        rows = self.rows()
        masked = torch.stack([row.logits for row in rows]) == -torch.inf
        assert (self.processed(rows)[masked] == -torch.inf).all()

    def test_a_row_without_a_token_left_stays_so(self) -> None:
        rows = self.rows()
        for row in rows[::2]:
            row.logits.fill_(-torch.inf)
        assert (self.processed(rows)[::2] == -torch.inf).all()

    def test_a_row_does_not_depend_on_the_rows_beside_it(self) -> None:
        rows = self.rows()
        together = self.processed(rows)
        for index, row in enumerate(rows):
            torch.testing.assert_close(self.processed([row])[0], together[index])

    def test_a_row_does_not_depend_on_earlier_calls(self) -> None:
        rows, used = self.rows(), self.processor()
        expected = self.processed(rows)
        for row in reversed(rows):
            self.processed([row], used)
        again = self.processed(rows[::-1], used).flip(0)
        torch.testing.assert_close(again, expected)

    def test_a_request_that_has_grown_is_looked_at_again(self) -> None:
        rows, used = self.rows(), self.processor()
        self.processed(rows, used)
        for row in rows:
            row.output_token_ids.append(7)
        torch.testing.assert_close(self.processed(rows, used), self.processed(rows))

    def test_no_randomness_of_its_own_is_used(self) -> None:
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = self.processed(self.rows())
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        assert torch.equal(self.processed(self.rows()), first)
