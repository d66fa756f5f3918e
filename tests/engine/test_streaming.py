"""What ``LLM.stream`` yields, piece by piece."""

from __future__ import annotations

import pytest

from hotshoe import LLM, SamplingParams


def pieces(llm: LLM, params: SamplingParams) -> tuple[list[list[str]], list[str]]:
    """New text per choice and update, and the final texts."""
    found: list[list[str]] = [[] for _ in range(params.n)]
    texts: list[str] = []
    for output in llm.stream("hello", params):
        for choice in output.outputs:
            found[choice.index].append(choice.new_text)
        texts = [choice.text for choice in output.outputs]
    return found, texts


@pytest.mark.parametrize("includes_stop", [True, False])
def test_pieces_make_up_the_text_when_a_stop_string_ends_it(llm: LLM, includes_stop: bool) -> None:
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    (full,) = pieces(llm, SamplingParams(**params))[1]
    stop = full[6:8]
    assert stop.strip()
    found, (text,) = pieces(
        llm, SamplingParams(**params, stop=(stop,), include_stop_str_in_output=includes_stop)
    )
    assert text == full[: full.index(stop) + len(stop) * includes_stop]
    assert "".join(found[0]) == text


def test_a_piece_of_one_choice_is_not_repeated_while_another_goes_on(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=24)
    found, texts = pieces(llm, params)
    assert ["".join(one) for one in found] == texts
    assert len({len(text) for text in texts}) > 1
