"""How outputs end, what is masked, and the text that comes of it, with drafts and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from golden.oracle import Oracle
from golden.prompts import QUESTIONS
from golden.variations import REFERENCE_PARTS
from hotshoe import LLM, CompletionOutput, SamplingParams
from hotshoe.api import DraftTokens, ProposeInput, Proposer
from hotshoe.testing.models import IM_END, IM_START, TINY_VOCAB_SIZE
from hotshoe.testing.scripted_model import installed_scripted_model


def script(text: str, *end: int) -> list[int]:
    """A text in bytes, then some more tokens."""
    return [*text.encode(), *end]


PLAIN, ENDS, MARKED, WIDE, REPEATED, BROKEN = range(6)
SCRIPTS = [
    script("The quick brown fox jumps over the lazy dog, twice."),
    script("Short.", IM_END, *b" And more after the end."),
    script("one", IM_START, *b"two", IM_START, *b"three"),
    script("naïve café 🙂🚀 日本語 مرحبا — done"),
    script("na na na na na na na na na na na na na na na na na na"),
    script("ab", 0xC3, 0x28, 0xF0, 0x9F, *b"cd", 0xE2, 0x82),
]


class ReadsTheScript(Proposer):
    """Drafts what will come, mostly; a wrong draft now and then."""

    max_draft_tokens = 4

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        drafts = []
        for history, limit in zip(inputs.token_ids, inputs.max_draft_tokens, strict=True):
            start = len(history) - 1
            coming = SCRIPTS[history[0]][start : start + limit]
            if start % 5 == 3:
                coming = [*coming[:1], *(65 for _ in coming[1:])]
            drafts.append(coming)
        return DraftTokens(token_ids=drafts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The scripted model, and the plugin that runs it."""
    with installed_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPTS) as model:
        yield model


@pytest.fixture(scope="module", params=[False, True], ids=["no_drafts", "drafts"])
def has_drafts(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=["uniproc", "overlapped"])
def executor(request: pytest.FixtureRequest, overlapped_executor: None) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(folder: Path, has_drafts: bool, executor: str) -> Iterator[LLM]:
    model = {"path": str(folder), "name": "scripted", "dtype": "float32", "max_model_len": 128}
    parts: dict[str, Any] = {"spec_decode": ReadsTheScript()} if has_drafts else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSHOE_SPEC_DECODE__ADAPTIVE", "false")
        with LLM(model=model, **parts) as one:
            yield one


@pytest.fixture(autouse=True)
def blocks_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever ended an output, the pool is whole afterwards."""
    yield
    if "llm" in request.fixturenames:
        kv_cache = request.getfixturevalue("llm").engine.kv_cache
        assert kv_cache.num_free_blocks == kv_cache.num_blocks


def complete(llm: LLM, number: int, **changes: Any) -> CompletionOutput:
    """What a script comes to; streamed and at once are the same."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, **changes})
    [output] = llm.generate([[number]], params)
    [choice] = output.outputs
    assert choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)
    streamed = ""
    for part in llm.stream([number], params):
        streamed += part.outputs[0].new_text
        assert part.outputs[0].text == streamed
    assert part.outputs[0].token_ids == choice.token_ids
    assert part.outputs[0].finish_reason == choice.finish_reason
    assert part.outputs[0].stop_reason == choice.stop_reason
    assert streamed == choice.text
    return choice


def test_drafts_are_accepted(llm: LLM, has_drafts: bool) -> None:
    choice = complete(llm, PLAIN)
    assert choice.metrics is not None
    assert (choice.metrics.num_accepted_tokens > 10) == has_drafts
    assert choice.metrics.num_accepted_tokens <= choice.metrics.num_draft_tokens


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_ends_an_output_exactly_there(llm: LLM, max_tokens: int) -> None:
    choice = complete(llm, PLAIN, max_tokens=max_tokens)
    assert choice.token_ids == SCRIPTS[PLAIN][:max_tokens]
    assert choice.text == "The quick brown fox"[:max_tokens]
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_output_without_max_tokens_fills_the_context(llm: LLM) -> None:
    choice = complete(llm, REPEATED, max_tokens=None, ignore_eos=True)
    assert len(choice.token_ids) == 127
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [7, 8, 40])
def test_eos_ends_an_output_even_as_the_last_allowed_token(llm: LLM, max_tokens: int) -> None:
    choice = complete(llm, ENDS, max_tokens=max_tokens, logprobs=1)
    assert choice.token_ids == [*b"Short.", IM_END]
    assert choice.text == "Short."
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_after_it(llm: LLM) -> None:
    choice = complete(llm, ENDS, max_tokens=31, ignore_eos=True)
    assert choice.text == "Short. And more after the end."
    assert choice.token_ids[6] == IM_END
    shown = complete(llm, ENDS, max_tokens=31, ignore_eos=True, skip_special_tokens=False)
    assert shown.text == "Short.<|im_end|> And more after the end."


def test_a_stop_token_ends_an_output_and_is_named(llm: LLM) -> None:
    choice = complete(llm, MARKED, stop_token_ids=[IM_START, ord("x")])
    assert choice.token_ids == [*b"one", IM_START]
    assert choice.text == "one"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", IM_START)


def test_a_stop_token_is_text_only_when_asked_for(llm: LLM) -> None:
    hidden = complete(llm, PLAIN, stop_token_ids=[ord("q")])
    assert (hidden.text, hidden.token_ids) == ("The ", [*b"The q"])
    shown = complete(llm, PLAIN, stop_token_ids=[ord("q")], include_stop_str_in_output=True)
    assert (shown.text, shown.stop_reason) == ("The q", ord("q"))


@pytest.mark.parametrize("min_tokens", [1, 7, 8, 13])
def test_min_tokens_masks_eos_and_stop_tokens(llm: LLM, min_tokens: int) -> None:
    choice = complete(llm, ENDS, min_tokens=min_tokens, stop_token_ids=[ord("e"), ord("d")])
    early, last = choice.token_ids[: min_tokens - 1], choice.token_ids[-1]
    assert not {IM_END, ord("e"), ord("d")} & set(early)
    assert len(choice.token_ids) >= min_tokens
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == (None if last == IM_END else last)


@pytest.mark.parametrize(
    "stop", [["brown"], ["own f", "brown"], ["zzz", "brown fox jumps", "brown"]]
)
def test_a_stop_string_ends_the_text_before_it(llm: LLM, stop: list[str]) -> None:
    choice = complete(llm, PLAIN, stop=stop, logprobs=0)
    assert choice.text == "The quick "
    assert choice.token_ids == [*b"The quick brown"]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "brown")


def test_a_stop_string_stays_when_asked_for(llm: LLM) -> None:
    choice = complete(llm, PLAIN, stop=["brown"], include_stop_str_in_output=True)
    assert choice.text == "The quick brown"


def test_text_that_only_began_like_a_stop_string_comes_out_at_the_end(llm: LLM) -> None:
    choice = complete(llm, PLAIN, stop=["fox jumped"], max_tokens=24)
    assert choice.text == "The quick brown fox jump"
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_a_stop_string_completed_by_the_last_allowed_token_counts(llm: LLM) -> None:
    choice = complete(llm, PLAIN, stop=["brown"], max_tokens=15)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "brown")
    assert choice.text == "The quick "


def test_stop_strings_are_not_looked_for_before_min_tokens(llm: LLM) -> None:
    choice = complete(llm, REPEATED, stop=["na"], min_tokens=10)
    assert choice.text == "na na na na "[:12]
    assert len(choice.token_ids) >= 11
    assert choice.stop_reason == "na"


def test_a_stop_string_of_wide_characters(llm: LLM) -> None:
    choice = complete(llm, WIDE, max_tokens=60, stop=["🚀 日"])
    assert choice.text == "naïve café 🙂"


def test_wide_characters_are_never_cut(llm: LLM) -> None:
    for max_tokens in range(1, 20):
        choice = complete(llm, WIDE, max_tokens=max_tokens)
        expected = bytes(SCRIPTS[WIDE][:max_tokens]).decode(errors="replace")
        assert (
            choice.text
            == expected
            == llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        )
    whole = complete(llm, WIDE, max_tokens=len(SCRIPTS[WIDE]))
    assert whole.text == "naïve café 🙂🚀 日本語 مرحبا — done"


def test_broken_bytes_come_out_as_decode_has_them(llm: LLM) -> None:
    for max_tokens in range(1, len(SCRIPTS[BROKEN]) + 1):
        choice = complete(llm, BROKEN, max_tokens=max_tokens)
        assert choice.text == llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)


def test_without_detokenization_there_is_no_text(llm: LLM) -> None:
    choice = complete(llm, PLAIN, detokenize=False)
    assert choice.text == ""
    assert choice.token_ids == SCRIPTS[PLAIN][:40]


def test_bad_words_do_not_appear(llm: LLM) -> None:
    choice = complete(llm, PLAIN, bad_words=["quick", "fox"])
    assert "quick" not in choice.text
    assert "fox" not in choice.text
    assert choice.text.startswith("The quic")
    assert choice.text[9:].startswith(" brown fo")


def test_a_bad_word_of_one_token_is_never_sampled(llm: LLM) -> None:
    choice = complete(llm, PLAIN, bad_words=["o", "u"])
    assert not set(b"ou") & set(choice.token_ids)


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    choice = complete(llm, PLAIN, allowed_token_ids=[*b"aeiou "])
    assert set(choice.token_ids) <= set(b"aeiou ")
    vowels = [(i, t) for i, t in enumerate(SCRIPTS[PLAIN][:40]) if t in b"aeiou "]
    assert all(choice.token_ids[i] == t for i, t in vowels)


def test_logit_bias_moves_a_token_up_and_down(llm: LLM) -> None:
    up = complete(llm, PLAIN, logit_bias={ord("X"): 31.0}, max_tokens=6)
    assert up.text == "XXXXXX"
    down = complete(llm, PLAIN, logit_bias={ord("q"): -31.0}, max_tokens=6)
    assert down.token_ids == [*b"The ", 0, *b"u"]
    near = complete(llm, PLAIN, logit_bias={ord("X"): 29.0}, max_tokens=6)
    assert near.text == "The qu"


def test_penalties_see_the_drafts_before_a_position(llm: LLM) -> None:
    choice = complete(llm, REPEATED, frequency_penalty=2.0, max_tokens=60, ignore_eos=True)
    counts = [choice.token_ids.count(token) for token in range(TINY_VOCAB_SIZE)]
    # 30 of logit are used up after 15 occurrences; after the 16th the token is below the others
    assert max(counts) == 15
    assert choice.token_ids[:45] == SCRIPTS[REPEATED][:45]


def test_a_request_that_leaves_no_token_fails_alone(llm: LLM) -> None:
    impossible = SamplingParams(
        temperature=0, allowed_token_ids=[ord("a")], bad_words_token_ids=((ord("a"),),)
    )
    fine = SamplingParams(temperature=0, max_tokens=9)
    bad, good = llm.generate([[PLAIN], [PLAIN]], [impossible, fine], on_error="return")
    assert bad.outputs[0].finish_reason == "error"
    assert "allowed_token_ids, bad_words mask every one" in (bad.outputs[0].error or "")
    assert good.text == "The quick"


@pytest.mark.slow
def test_embedded_answers_end_where_generate_ends_them(embedded_oracle: Oracle) -> None:
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM(max_model_len=256, **REFERENCE_PARTS) as llm:
        [eos] = llm.tokenizer.eos_token_ids
        chats = [[{"role": "user", "content": one}] for one in (QUESTIONS[4], QUESTIONS[15])]
        chats.append([{"role": "user", "content": "Say the single word: yes"}])
        outputs = llm.chat(chats, params)
        for output in outputs:
            [choice] = output.outputs
            expected = embedded_oracle.greedy(output.prompt_token_ids, 48, eos)
            assert choice.token_ids == expected.token_ids
            is_stopped = choice.token_ids[-1] == eos
            assert choice.finish_reason == ("stop" if is_stopped else "length")
            assert choice.text == llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
            streamed = llm.stream(output.prompt_token_ids, params)
            assert "".join(part.outputs[0].new_text for part in streamed) == choice.text
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
