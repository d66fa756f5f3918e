"""The built-in tool parsers: the conformance suite, their constraints, and what models write."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from hotshoe.api import Component, PluginOptions, RequestError, Tool, ToolChoice, ToolParser
from hotshoe.api.tool_parsers import ToolParserContext
from hotshoe.testing.parsers import CHOICE, CLOCK, WEATHER, ToolParserConformance
from hotshoe_tool_parsers import hermes, llama3_json, mistral, pythonic

MODULES = [hermes, llama3_json, mistral, pythonic]


class TestHermesConformance(ToolParserConformance):
    def component(self) -> Component:
        return hermes.hotshoe_component()


class TestLlama3JsonConformance(ToolParserConformance):
    allows_text_before = False

    def component(self) -> Component:
        return llama3_json.hotshoe_component()


class TestMistralConformance(ToolParserConformance):
    def component(self) -> Component:
        return mistral.hotshoe_component()


class TestPythonicConformance(ToolParserConformance):
    allows_text_before = False

    def component(self) -> Component:
        return pythonic.hotshoe_component()


def parser_of(module: ModuleType) -> ToolParser:
    built: ToolParser = module.build(PluginOptions(), ToolParserContext())
    return built


def calls_of(module: ModuleType, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parsed = parser_of(module).parse(text, CHOICE)
    return parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


OSLO = [("get_weather", {"city": "Oslo"})]
BOTH = [*OSLO, ("get_weather_time", {})]


@pytest.mark.parametrize(
    ("module", "text", "content", "calls"),
    [
        (hermes, '<tool_call>{"name":"get_weather","arguments":{"city":"Oslo"}}', "", OSLO),
        (hermes, '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}', "", OSLO),
        (
            hermes,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>\n'
            '<tool_call>{"name": "get_weather_time"}</tool_call>',
            "",
            BOTH,
        ),
        (hermes, "use <tool_call> tags", "use <tool_call> tags", []),
        (
            hermes,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}</tool_call> and',
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}</tool_call> and',
            [],
        ),
        (
            hermes,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
            "",
            [("get_weather", {"city": "</tool_call>"})],
        ),
        (llama3_json, '{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", OSLO),
        (
            llama3_json,
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
            '{"name": "get_weather_time", "parameters": {}}',
            "",
            BOTH,
        ),
        (llama3_json, '{"city": "Oslo"}', '{"city": "Oslo"}', []),
        (llama3_json, 'so {"name": "get_weather"}', 'so {"name": "get_weather"}', []),
        (
            mistral,
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a"}, '
            '{"name": "get_weather_time", "arguments": {}}]',
            "",
            BOTH,
        ),
        (mistral, "see [TOOL_CALLS] there", "see [TOOL_CALLS] there", []),
        (pythonic, "[get_weather(city='Oslo'), get_weather_time()]", "", BOTH),
        (pythonic, "[1] says so", "[1] says so", []),
        (pythonic, "[get_weather('Oslo')]", "[get_weather('Oslo')]", []),
        (pythonic, "[x for x in y]", "[x for x in y]", []),
        (pythonic, "[get_weather(city={1, 2})]", "[get_weather(city={1, 2})]", []),
        (
            pythonic,
            "[get_weather(city={'a': [None, True, -1.5, (1,)]}, unit=null)]",
            "",
            [("get_weather", {"city": {"a": [None, True, -1.5, [1]]}, "unit": None})],
        ),
    ],
)  # fmt: skip
def test_what_models_write_is_read(
    module: ModuleType, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    assert calls_of(module, text) == (content, calls)


@pytest.mark.parametrize("module", MODULES)
def test_half_a_surrogate_pair_stays_an_escape(module: ModuleType) -> None:
    call = parser_of(module).write(CHOICE_CALLS)
    parsed = parser_of(module).parse(call.replace("Oslo", r"\ud83d"), CHOICE)
    assert len(parsed.tool_calls) == 1
    parsed.tool_calls[0].arguments.encode()


CHOICE_CALLS = [hermes.ToolCall("get_weather", '{"city": "Oslo"}')]


def test_arguments_of_a_constrained_call_go_out_as_they_grow() -> None:
    stream = parser_of(hermes).stream(CHOICE, is_constrained=True)
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    told = [list(stream.feed(text[at : at + 5])) for at in range(0, len(text), 5)]
    assert len([deltas for deltas in told if deltas]) >= 4
    assert stream.finish() == []


class Language:
    """Which texts a constraint allows, by xgrammar's matcher over bytes."""

    def __init__(self, module: ModuleType, choice: ToolChoice) -> None:
        xgrammar = pytest.importorskip("xgrammar")
        spec = parser_of(module).constraint(choice)
        assert spec is not None
        assert spec.kind == "structural_tag"
        vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256]
        )
        grammar = xgrammar.Grammar.from_structural_tag(spec.value)
        self._compiled = xgrammar.GrammarCompiler(info).compile_grammar(grammar)
        self._matcher = xgrammar.GrammarMatcher

    def allows(self, text: str) -> bool:
        matcher = self._matcher(self._compiled)
        return bool(matcher.accept_string(text) and matcher.accept_token(256))


def written(module: ModuleType, *cities: str) -> str:
    """Calls as the constraint has them; the pythonic form with JSON's quotes."""
    if module is pythonic:
        return "[" + ", ".join(f'get_weather(city="{city}")' for city in cities) + "]"
    calls = [hermes.ToolCall("get_weather", json.dumps({"city": city})) for city in cities]
    return parser_of(module).write(calls)


@pytest.mark.parametrize("module", MODULES)
def test_a_required_call_is_all_there_is(module: ModuleType) -> None:
    language = Language(module, ToolChoice(tools=CHOICE.tools, is_required=True))
    assert language.allows(written(module, "Oslo"))
    assert language.allows(written(module, "Oslo", "Rome"))
    assert language.allows(written(module, *["Oslo"] * 8))
    assert not language.allows(written(module, *["Oslo"] * 9))
    assert not language.allows("")
    assert not language.allows("It is sunny")
    assert not language.allows(written(module, "Oslo") + " done")
    assert not language.allows(written(module, "Oslo").replace("city", "town"))
    assert not language.allows(written(module, "Oslo").replace("get_weather", "rm_rf"))


@pytest.mark.parametrize("module", MODULES)
def test_one_call_is_all_there_is_without_parallel_calls(module: ModuleType) -> None:
    choice = ToolChoice(tools=CHOICE.tools, is_required=True, allows_parallel=False)
    language = Language(module, choice)
    assert language.allows(written(module, "Oslo"))
    assert not language.allows(written(module, "Oslo", "Rome"))


@pytest.mark.parametrize("module", MODULES)
def test_free_text_may_have_calls_that_follow_the_schema(module: ModuleType) -> None:
    language = Language(module, CHOICE)
    assert language.allows("It is sunny\n")
    assert language.allows(written(module, "Oslo"))
    assert not language.allows(written(module, "Oslo").replace("city", "town"))


@pytest.mark.parametrize("module", [hermes, mistral])
def test_free_text_may_come_before_a_constrained_call(module: ModuleType) -> None:
    language = Language(module, CHOICE)
    assert language.allows("Let me see. " + written(module, "Oslo"))
    assert not language.allows("Let me see. " + written(module, "Oslo").replace("city", "town"))


@pytest.mark.parametrize("module", [hermes, llama3_json, mistral])
def test_only_strict_functions_are_constrained_in_free_text(module: ModuleType) -> None:
    loose = Tool(name="get_weather", parameters=WEATHER.parameters)
    language = Language(module, ToolChoice(tools=(loose, CLOCK)))
    assert language.allows(written(module, "Oslo").replace("city", "town"))


@pytest.mark.parametrize("module", MODULES)
def test_constrained_texts_are_read_with_valid_arguments(module: ModuleType) -> None:
    text = written(module, "Os\\u006co", "a\\\"}]')")
    parsed = parser_of(module).parse(text, CHOICE, is_constrained=True)
    assert parsed.content == ""
    assert len(parsed.tool_calls) == 2
    for call in parsed.tool_calls:
        jsonschema.validate(json.loads(call.arguments), WEATHER.parameters)


def pythonic_tool(**schema: Any) -> ToolChoice:
    return ToolChoice(tools=(Tool(name="f", parameters=schema),), is_required=True)


def test_optional_arguments_of_the_pythonic_form_come_in_order() -> None:
    properties = {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/flag"}, "c": {"type": "null"}}
    shared = {"properties": properties, "$defs": {"flag": {"type": "boolean"}}}
    some = Language(pythonic, pythonic_tool(**shared, required=["b"]))
    assert some.allows("[f(b=true)]")
    assert some.allows("[f(b=true, a=1, c=null)]")
    assert not some.allows("[f(a=1)]")
    assert not some.allows("[f(b=1)]")
    none = Language(pythonic, pythonic_tool(**shared))
    for text in ("[f()]", "[f(a=1)]", "[f(b=true, c=null)]", "[f(a=1, c=null)]"):
        assert none.allows(text), text
    assert not none.allows("[f(c=null, a=1)]")
    assert not none.allows("[f(, a=1)]")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (pythonic_tool(properties={"class": {}}), "'class' can't be the name of an argument"),
        (pythonic_tool(anyOf=[{}]), "can't enforce 'anyOf'"),
        (pythonic_tool(required=["a"]), "'a' is required but not described"),
        (ToolChoice(tools=(Tool(name="a-b"),), is_required=True), "'a-b' can't be the name"),
    ],
)
def test_what_the_pythonic_form_cannot_say_is_refused(choice: ToolChoice, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parser_of(pythonic).constraint(choice)
