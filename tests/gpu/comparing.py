"""Tokens compared, with the excuse that rounding has."""

from __future__ import annotations

from collections.abc import Sequence

from hotshoe import RequestOutput

MARGIN = 1e-3
"""Log probabilities that are as close as that may change places."""
MAX_EXCUSED = 2


def assert_greedy(expected: Sequence[RequestOutput], actual: Sequence[Sequence[int]]) -> None:
    """Check greedy outputs against those of a reference, whose requests asked for two logprobs.

    An output may differ from a place on where the reference's best two tokens are as good as equal;
    few do.
    """
    excused = 0
    for number, (output, found) in enumerate(zip(expected, actual, strict=True)):
        choice = output.outputs[0]
        places = zip(choice.token_ids, found, strict=True)
        place = next((at for at, (one, other) in enumerate(places) if one != other), None)
        if place is None:
            continue
        assert choice.logprobs is not None
        best, second = sorted((one.logprob for one in choice.logprobs[place].top), reverse=True)[:2]
        assert best - second < MARGIN, (
            f"prompt {number} differs from token {place} on: {choice.token_ids[place:][:8]}, on "
            f"the GPU {list(found[place:][:8])}; the best two are {best - second:.2e} apart"
        )
        excused += 1
    assert excused <= MAX_EXCUSED


def assert_drawn(expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]]) -> None:
    """Check drawn outputs: the same but for few, where rounding may have decided a draw."""
    assert len(expected) == len(actual)
    different = [
        number
        for number, (one, other) in enumerate(zip(expected, actual, strict=True))
        if list(one) != list(other)
    ]
    assert len(different) <= MAX_EXCUSED, f"prompts {different} are drawn differently"
