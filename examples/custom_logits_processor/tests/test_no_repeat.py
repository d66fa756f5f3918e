from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import hotshoe_no_repeat
import numpy as np
import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import Component, RequestError
from hotshoe.testing.logits_processor import LogitsProcessorConformance
from hotshoe.testing.models import write_tiny_checkpoint

NAME = "no_repeat_ngram"


class TestNoRepeat(LogitsProcessorConformance):
    """What hotshoe relies on, whatever is masked."""

    options: ClassVar[dict[str, Any]] = {"size": 3}

    def component(self) -> Component:
        return hotshoe_no_repeat.hotshoe_component()


class TestNoRepeatByRequest(TestNoRepeat):
    """The same, where requests choose the size and prompts count."""

    options: ClassVar[dict[str, Any]] = {"size": 0, "include_prompt": True}
    extra_args: ClassVar[dict[str, Any] | None] = {"no_repeat_ngram_size": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def load(checkpoint: str, apply: str = "on_request", **sections: Any) -> LLM:
    processor = {"name": NAME, "apply": apply}
    return LLM(checkpoint, sampler={"logits_processors": [processor]}, **sections)


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> Iterator[LLM]:
    """An engine whose requests may ask for the processor."""
    with load(checkpoint) as one:
        yield one


def greedy(**changes: Any) -> SamplingParams:
    """Sixty tokens out of eight: a model that may repeat itself does."""
    letters = range(97, 105)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    return SamplingParams(**fields, **{"allowed_token_ids": letters, **changes})


def outputs(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    prompts = ["hello" for _ in params]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, list(params))]


def has_repetition(token_ids: Sequence[int], size: int) -> bool:
    ngrams = [tuple(token_ids[at : at + size]) for at in range(len(token_ids) - size + 1)]
    return len(set(ngrams)) < len(ngrams)


@pytest.mark.parametrize(
    ("history", "size", "expected"),
    [
        ([1, 2, 3, 1, 2], 3, [3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, [3, 4]),
        ([1, 1, 1], 2, [1]),
        ([5, 6], 1, [5, 6]),
        ([1, 2], 3, []),
        ([], 1, []),
        ([1, 1, 1], 0, []),
    ],
)
def test_tokens_that_would_complete_a_known_sequence(
    history: list[int], size: int, expected: list[int]
) -> None:
    found = hotshoe_no_repeat.completing(np.array(history, dtype=np.int32), size)
    assert sorted(found) == expected


def test_request_that_asks_repeats_nothing_and_the_one_beside_it_is_left_alone(llm: LLM) -> None:
    free, asking, other = outputs(
        llm,
        greedy(),
        greedy(logits_processors=(NAME,)),
        greedy(logits_processors=(NAME,), extra_args={"no_repeat_ngram_size": 4}),
    )
    assert has_repetition(free, 4)
    assert not has_repetition(asking, 3)
    assert has_repetition(other, 3)
    assert not has_repetition(other, 4)


def test_processor_that_always_applies_needs_no_asking(llm: LLM, checkpoint: str) -> None:
    (asking,) = outputs(llm, greedy(logits_processors=(NAME,)))
    with load(checkpoint, "always") as always:
        assert outputs(always, greedy()) == [asking]


def test_drafts_change_nothing(llm: LLM, checkpoint: str) -> None:
    params = [greedy(logits_processors=(NAME,)), greedy()]
    with load(checkpoint, spec_decode="ngram") as drafting:
        assert outputs(drafting, *params) == outputs(llm, *params)


def test_wrong_size_fails_that_request_alone(llm: LLM) -> None:
    wrong = greedy(logits_processors=(NAME,), extra_args={"no_repeat_ngram_size": "many"})
    with pytest.raises(RequestError, match="no_repeat_ngram_size is 'many'; allowed: a whole"):
        llm.generate("hello", wrong)
    assert outputs(llm, greedy())
