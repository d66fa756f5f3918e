"""The n-gram proposer: the conformance suite, and which earlier place it copies from."""

from __future__ import annotations

import sys
from subprocess import run

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hotshoe.api import Component, ProposeInput
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

    Suite.options = {"min_ngram": 2, "drafts_per_matched_token": None} | options
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
    tokens = [1, 2, 10, 11, 1, 2, 30, 31, 1, 2, 30, 32, 1, 2, 20, 21, 1, 2]
    assert drafts_for(tokens, num_draft_tokens=2) == [30, 32]
    assert drafts_for(tokens, num_draft_tokens=2, prefer="latest") == [20, 21]
    assert drafts_for(tokens, num_draft_tokens=2, prefer="earliest") == [10, 11]


def test_equally_frequent_ones_are_copied_from_the_latest() -> None:
    tokens = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2]
    assert drafts_for(tokens, num_draft_tokens=2) == [20, 21]


def test_a_loop_is_drafted_in_full_although_its_last_turn_is_too_short() -> None:
    assert drafts_for([7] * 4, num_draft_tokens=4) == [7, 7, 7, 7]
    assert drafts_for([1, 2, 3, 4, 2, 3, 4, 2], num_draft_tokens=6, min_ngram=1) == [3, 4, 2] * 2


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5]])
def test_no_earlier_place_means_no_draft(tokens: list[int]) -> None:
    assert drafts_for(tokens) == []


def test_a_match_shorter_than_min_ngram_does_not_count() -> None:
    tokens = [5, 3, 8, 9, 3]
    assert drafts_for(tokens, min_ngram=2) == []
    assert drafts_for(tokens, min_ngram=1, num_draft_tokens=2) == [8, 9]


@pytest.mark.parametrize(("length", "num_drafts"), [(1, 3), (2, 5), (4, 9), (6, 13), (9, 16)])
def test_the_longer_the_match_the_more_is_drafted(length: int, num_drafts: int) -> None:
    text = list(range(100, 140))
    tokens = [*text, 0, *text[10 - length : 10]]
    options = {"min_ngram": 1, "num_draft_tokens": 16, "drafts_per_matched_token": 2}
    assert drafts_for(tokens, 64, **options) == text[10 : 10 + num_drafts]


def test_an_empty_range_of_lengths_is_refused_with_both_values() -> None:
    with pytest.raises(ValidationError, match="min_ngram is 5 but max_ngram is 4"):
        ngram.NgramOptions(min_ngram=5)


def test_module_imports_without_torch() -> None:
    code = "import hotshoe_spec_decode.ngram, sys; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def searched(token_ids: list[int], allowed: int, options: ngram.NgramOptions) -> list[int]:
    """The drafts, by trying every place."""
    wanted = min(allowed, options.num_draft_tokens)
    end = len(token_ids)
    per_token = options.drafts_per_matched_token

    def length_at(place: int) -> int:
        length = 0
        while length < place and token_ids[place - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length

    lengths = {place: length_at(place) for place in range(1, end)}
    longest = min(max(lengths.values(), default=0), options.max_ngram)
    if not wanted or longest < options.min_ngram:
        return []
    places = [place for place, length in lengths.items() if length >= longest]
    if options.prefer == "frequent":
        places = places[-8:]
    else:
        places = places[-1:] if options.prefer == "latest" else places[:1]
    if per_token is not None:
        if longest == options.max_ngram:
            most = max(-(-(wanted - 1) // per_token), longest)
            longest = min(max(lengths[place] for place in places), most)
            places = [place for place in places if lengths[place] >= longest]
        wanted = min(wanted, per_token * longest + 1)
    text = list(token_ids)
    while len(text) < end + wanted:
        at = len(text) - end
        following = [text[place + at] for place in reversed(places)]
        text.append(max(following, key=following.count))
        places = [place for place in places if text[place + at] == text[-1]]
    return text[end:]


class Requests:
    """Requests as a proposer sees them, step by step."""

    def __init__(self, options: ngram.NgramOptions) -> None:
        self.options = options
        self.proposer = ngram.NgramProposer(options)
        self.token_ids: dict[str, list[int]] = {}

    def step(self, new: dict[str, list[int]], allowed: int) -> None:
        """Give requests tokens, and compare the drafts with a search."""
        for name, token_ids in new.items():
            self.token_ids[name] += token_ids
        names = list(self.token_ids)
        drafts = self.proposer.propose(
            ProposeInput(
                request_ids=names,
                token_ids=[np.array(self.token_ids[name], np.int32) for name in names],
                num_computed_tokens=[len(self.token_ids[name]) - 1 for name in names],
                max_draft_tokens=[allowed] * len(names),
                num_drafted=[max(len(new.get(name, [])) - 1, 0) for name in names],
                num_accepted=[max(len(new.get(name, [])) - 1, 0) for name in names],
                query_start_loc=list(range(len(names) + 1)),
                hidden_states={},
            )
        )
        for name, token_ids in zip(names, drafts.token_ids, strict=True):
            assert token_ids == searched(self.token_ids[name], allowed, self.options)


OPTIONS = st.builds(
    ngram.NgramOptions,
    min_ngram=st.integers(1, 3),
    max_ngram=st.integers(3, 5),
    num_draft_tokens=st.integers(1, 9),
    drafts_per_matched_token=st.none() | st.integers(1, 3),
    prefer=st.sampled_from(["frequent", "latest", "earliest"]),
)


@settings(max_examples=60, deadline=None)
@given(OPTIONS, st.data())
def test_the_index_finds_what_a_search_finds(
    options: ngram.NgramOptions, data: st.DataObject
) -> None:
    numbers = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    requests = Requests(options)
    num_kinds = data.draw(st.sampled_from([1, 2, 4, 30]))  # few kinds of tokens repeat a lot

    def some(count: int) -> list[int]:
        return [int(one) for one in numbers.integers(0, num_kinds, count)]

    for name in "ab":
        requests.token_ids[name] = some(data.draw(st.integers(0, 40)))
    requests.token_ids["long"] = some(data.draw(st.sampled_from([513, 514, 515, 700])))
    moves = data.draw(st.lists(st.sampled_from(["grow", "off", "new"]), max_size=12))
    for move in ["grow", *moves, "grow"]:
        name = str(numbers.choice(list(requests.token_ids)))
        if move == "new":
            requests.proposer.forget([name])
            requests.token_ids[name] = some(len(requests.token_ids[name]))
        new = {one: some(int(numbers.integers(1, 7))) for one in requests.token_ids}
        requests.step(new, 0 if move == "off" else int(numbers.integers(1, 12)))


@pytest.mark.parametrize("period", [1, 2, 3, 257, 1700])
@pytest.mark.parametrize("prefer", ["frequent", "latest", "earliest"])
def test_long_repetitive_texts_are_found_as_by_a_search(prefer: str, period: int) -> None:
    requests = Requests(ngram.NgramOptions.model_validate({"prefer": prefer}))
    numbers = np.random.default_rng(period)
    text = [int(one) for one in numbers.integers(0, 300, period)] * (1 + 5000 // period)
    requests.token_ids["a"] = []
    start = 0
    for size in (3, 508, 1, 1, 1, 1, 1, 600, 700, 1, 900, 1, 1, 600):  # merge some runs, not all
        requests.step({"a": text[start : start + size]}, 12)
        start += size


def test_matches_across_sorted_runs_are_found() -> None:
    options = ngram.NgramOptions(min_ngram=2)
    text = list(range(2, 2102))
    for place in range(1493, 1505):
        requests = Requests(options)
        requests.token_ids["a"] = text[:1501]
        requests.step({}, 12)  # sorts the first 1500
        requests.step({"a": text[1501:]}, 12)  # sorts the others apart from them
        requests.step({"a": text[place : place + 4]}, 12)


def test_larger_token_ids_than_before_are_new() -> None:
    requests = Requests(ngram.NgramOptions())
    requests.token_ids["a"] = [0, 1, 2, 3] * 200
    for token_id in (4, 5, 4, 800, 1, 2, 2**20, 3, 4):
        requests.step({"a": [token_id]}, 12)
