"""The n-gram proposer: the conformance suite, and which earlier place it copies from."""

from __future__ import annotations

import sys
from subprocess import run

import numpy as np
import pytest
from pydantic import ValidationError

from hotshoe.api import Component
from hotshoe.testing.spec_decode import ProposerConformance
from hotshoe_spec_decode import ngram


class TestNgram(ProposerConformance):
    def component(self) -> Component:
        return ngram.hotshoe_component()


class TestNgramEarliest(TestNgram):
    options = {"prefer": "earliest", "min_ngram": 1, "max_ngram": 2, "num_draft_tokens": 7}  # noqa: RUF012  # overrides a ClassVar


def drafts_for(token_ids: list[int], allowed: int = 9, **options: object) -> list[int]:
    class Suite(TestNgram):
        pass

    Suite.options = options
    suite = Suite()
    inputs = suite.inputs([np.array(token_ids, dtype=np.int32)], [allowed])
    return list(suite.proposer().propose(inputs).token_ids[0])


def test_what_followed_the_same_tokens_before_is_drafted() -> None:
    assert drafts_for([1, 2, 3, 4, 5, 6, 2, 3], num_draft_tokens=2) == [4, 5]


def test_the_longest_match_wins_over_a_later_one() -> None:
    tokens = [1, 2, 3, 10, 11, 12, 2, 3, 20, 21, 22, 1, 2, 3]
    assert drafts_for(tokens, num_draft_tokens=2) == [10, 11]
    assert drafts_for(tokens, num_draft_tokens=2, max_ngram=2) == [20, 21]


def test_of_equal_matches_the_preferred_one_is_copied() -> None:
    tokens = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2]
    assert drafts_for(tokens, num_draft_tokens=2) == [20, 21]
    assert drafts_for(tokens, num_draft_tokens=2, prefer="earliest") == [10, 11]


def test_a_loop_is_drafted_in_full_although_its_last_turn_is_too_short() -> None:
    assert drafts_for([7] * 12, num_draft_tokens=4) == [7, 7, 7, 7]
    assert drafts_for([7] * 4, num_draft_tokens=4) == [7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5]])
def test_no_earlier_place_means_no_draft(tokens: list[int]) -> None:
    assert drafts_for(tokens) == []


def test_a_match_shorter_than_min_ngram_does_not_count() -> None:
    tokens = [5, 3, 8, 9, 3]
    assert drafts_for(tokens, min_ngram=2) == []
    assert drafts_for(tokens, min_ngram=1, num_draft_tokens=2) == [8, 9]


def test_an_empty_range_of_lengths_is_refused_with_both_values() -> None:
    with pytest.raises(ValidationError, match="min_ngram is 5 but max_ngram is 4"):
        ngram.NgramOptions(min_ngram=5)


def test_module_imports_without_torch() -> None:
    code = "import hotshoe_spec_decode.ngram, sys; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
