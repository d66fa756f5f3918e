from collections.abc import Sequence

import hotshoe_sjf
import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import Component
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe.testing.scheduler import SchedulerConformance

Job = tuple[str, int]
"""A prompt and the number of tokens to generate."""

LONG, SHORT, MIDDLE = ("a long story", 40), ("a word", 4), ("a line", 20)


class TestSjf(SchedulerConformance):
    """What hotshoe relies on, whatever the order."""

    def component(self) -> Component:
        return hotshoe_sjf.hotshoe_component()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def order_of_finish(llm: LLM, jobs: Sequence[Job]) -> list[Job]:
    """The jobs, all sent at once, in the order in which they finish."""
    finished: list[int] = []
    llm.on_finish(lambda request: finished.append(request.num_output_tokens))
    llm.generate(
        [prompt for prompt, _ in jobs],
        [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for _, num in jobs],
    )
    by_length = {num: (prompt, num) for prompt, num in jobs}
    return [by_length[num] for num in finished]


def one_at_a_time(checkpoint: str, *, aging: float) -> LLM:
    """An engine under this scheduler, so small that it has to choose."""
    scheduler = {"name": "sjf", "options": {"aging": aging}, "max_num_seqs": 1}
    return LLM(checkpoint, scheduler=scheduler)


def test_shortest_job_finishes_first(checkpoint: str) -> None:
    with one_at_a_time(checkpoint, aging=0) as llm:
        assert order_of_finish(llm, [LONG, SHORT, MIDDLE]) == [SHORT, MIDDLE, LONG]


def test_strong_aging_serves_in_order_of_arrival(checkpoint: str) -> None:
    with one_at_a_time(checkpoint, aging=1e12) as llm:
        assert order_of_finish(llm, [LONG, SHORT, MIDDLE]) == [LONG, SHORT, MIDDLE]


def test_cached_prefix_makes_a_job_shorter(checkpoint: str) -> None:
    known, new = ("known " * 20, 9), ("other " * 10, 8)
    with one_at_a_time(checkpoint, aging=0) as llm:
        llm.generate(known[0], SamplingParams(max_tokens=1))
        assert order_of_finish(llm, [new, known]) == [known, new]
    with one_at_a_time(checkpoint, aging=0) as llm:
        assert order_of_finish(llm, [new, known]) == [new, known]
