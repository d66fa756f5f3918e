"""Stop strings, alone and over a detokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotshoe.api.sampling_params import SamplingParams
from hotshoe.errors import RequestError
from hotshoe.text.stop import StopChecker
from hotshoe.text.stream import OutputText, StopMatch
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer

ALPHABET = st.text("ab\u00e9", max_size=30)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """By definition: read character by character, stop as soon as the text ends in a stop."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(ALPHABET, STOPS, st.booleans(), st.data())
@settings(deadline=None)
def test_any_cut_of_the_text_gives_the_same_result(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    checker = StopChecker(stops, include_stop_str=include)
    shown = ""
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += checker.add(rest[:size])
        assert expected(text, stops, include=include)[0].startswith(shown)
        rest = rest[size:]
    shown += checker.flush()
    assert (shown, checker.matched) == expected(text, stops, include=include)


@given(ALPHABET, STOPS)
@settings(deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = checker.add(text)
    if checker.matched is None:
        held_back = text[len(shown) :]
        assert held_back == "" or any(
            stop.startswith(held_back) and stop != held_back for stop in stops
        )


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop: got an empty string"):
        StopChecker(["a", ""])


def test_nothing_follows_a_match() -> None:
    checker = StopChecker(["."])
    assert checker.add("one. two") == "one"
    assert checker.add(" three") == ""
    assert checker.flush() == ""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("embedded")


def test_tokens_after_the_stop_string_are_not_counted(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one two three four")
    output = OutputText(tokenizer, SamplingParams(stop=(" three",)), [])
    assert output.append(token_ids[:1]) is None
    assert output.append(token_ids[1:]) == StopMatch(" three", 2)
    assert output.text == "one two"


def test_stop_string_that_spans_tokens_is_never_shown_in_part(tokenizer: Tokenizer) -> None:
    text = "The end.\n\nUser: hello"
    output = OutputText(tokenizer, SamplingParams(stop=("\n\nUser:",)), [])
    deltas = []
    for token_id in tokenizer.encode(text):
        match = output.append([token_id])
        deltas.append(output.delta())
        if match is not None:
            break
    assert match is not None
    assert match.stop == "\n\nUser:"
    assert "".join(deltas) == output.text == "The end."


def test_included_stop_string_stays_and_what_follows_it_in_its_token_goes(
    tokenizer: Tokenizer,
) -> None:
    params = SamplingParams(stop=("tw",), include_stop_str_in_output=True)
    output = OutputText(tokenizer, params, [])
    assert output.append(tokenizer.encode("one two three")) == StopMatch("tw", 2)
    assert output.text == "one tw"


def test_held_back_text_appears_when_the_output_ends(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams(stop=("!!!",)), [])
    assert output.append(tokenizer.encode("wow!!")) is None
    assert output.delta() == "wow"
    assert output.finish() is None
    assert output.delta() == "!!"
    assert output.text == "wow!!"


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a b a b a b")
    output = OutputText(tokenizer, SamplingParams(stop=(" b",), min_tokens=3), [])
    assert output.append(token_ids) == StopMatch(" b", 4)
    assert output.text == "a b a"


def test_without_detokenizing_there_is_no_text(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams(detokenize=False), [])
    assert output.append([5, 6, 7]) is None
    assert output.finish() is None
    assert (output.text, output.delta()) == ("", "")


def test_deltas_joined_are_the_text_without_stop_strings_too(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams(), tokenizer.encode("Hi"))
    deltas = []
    for token_id in tokenizer.encode(" there \U0001f600!"):
        output.append([token_id])
        deltas.append(output.delta())
    output.finish()
    deltas.append(output.delta())
    assert "".join(deltas) == output.text == " there \U0001f600!"
    assert all("\ufffd" not in delta for delta in deltas)
