"""``think_tags``: the conformance suite, and where reasoning begins and ends."""

from __future__ import annotations

import json

import pytest

from hotshoe.api import Component, GrammarSpec, ReasoningDelta, RequestError
from hotshoe.testing.parsers import ReasoningParserConformance
from hotshoe_reasoning_parsers import think_tags
from hotshoe_reasoning_parsers.think_tags import ThinkTags, ThinkTagsOptions


class TestThinkTagsConformance(ReasoningParserConformance):
    text = "<think>\nShort.\n</think>\n\nYes."
    reasoning = "Short."
    content = "Yes."

    def component(self) -> Component:
        return think_tags.hotshoe_component()


class TestOpenThinkTagsConformance(TestThinkTagsConformance):
    prompt_end = "<|assistant|><think>\n"
    text = "Short.\n</think>\n\nYes."


PARSER = ThinkTags(ThinkTagsOptions())
OPEN_PARSER = ThinkTags(ThinkTagsOptions(is_start_tag_optional=True))


@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "parsed"),
    [
        (PARSER, "", "Yes.", ReasoningDelta("", "Yes.")),
        (PARSER, "", "\n Yes.", ReasoningDelta("", "\n Yes.")),
        (PARSER, "", "so <think>a</think>", ReasoningDelta("", "so <think>a</think>")),
        (PARSER, "", "<think>cut sho", ReasoningDelta("cut sho", "")),
        (PARSER, "", "<think>cut </thi", ReasoningDelta("cut </thi", "")),
        (PARSER, "<think>\n", "a</think>b", ReasoningDelta("a", "b")),
        (PARSER, "<think>\n", "<think>a</think>b", ReasoningDelta("a", "b")),
        (PARSER, "<think>\n\n</think>\n\n", "b", ReasoningDelta("", "b")),
        (PARSER, "say <think> twice", "b", ReasoningDelta("", "b")),
        (OPEN_PARSER, "", "a</think>b", ReasoningDelta("a", "b")),
        (OPEN_PARSER, "", "<think>a</think>b", ReasoningDelta("a", "b")),
        (OPEN_PARSER, "<think></think>", "b", ReasoningDelta("", "b")),
    ],
)
def test_reasoning_is_found(
    parser: ThinkTags, prompt_end: str, text: str, parsed: ReasoningDelta
) -> None:
    assert parser.parse(text, prompt_end) == parsed


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        (GrammarSpec(kind="json", value='{"type": "integer"}'), "17"),
        (GrammarSpec(kind="json_object"), '{"a": 1}'),
        (GrammarSpec(kind="regex", value="a+"), "aaa"),
        (GrammarSpec(kind="choice", value='["yes", "no"]'), "no"),
        (GrammarSpec(kind="choice", value='["yes"]'), "yes"),
        (
            GrammarSpec(
                kind="structural_tag",
                value=json.dumps(
                    {"type": "structural_tag", "format": {"type": "const_string", "value": "b"}}
                ),
            ),
            "b",
        ),
    ],
)
def test_a_constraint_holds_for_the_answer_alone(spec: GrammarSpec, answer: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(
        vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256]
    )

    def allows(text: str, prompt_end: str) -> bool:
        around = PARSER.constraint(spec, prompt_end)
        assert around is not None
        grammar = xgrammar.Grammar.from_structural_tag(around.value)
        matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
        return bool(matcher.accept_string(text) and matcher.accept_token(256))

    assert allows(answer, "")
    assert allows(f"<think>\nfree text\n</think>\n\n{answer}", "")
    assert not allows(f"<think>free text</think>x{answer}", "")
    assert not allows("<think>free text", "")
    assert allows(f"free text</think>{answer}", "<think>\n")
    assert not allows(answer, "<think>\n")


def test_a_grammar_has_no_place_behind_reasoning() -> None:
    assert PARSER.constraint(GrammarSpec(kind="grammar", value='root ::= "a"'), "") is None


def test_a_constraint_that_is_no_json_is_refused() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json: is not valid JSON"):
        PARSER.constraint(GrammarSpec(kind="json", value="{"), "")
