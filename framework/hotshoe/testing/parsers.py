"""The conformance suites of the tool-parser and reasoning-parser contracts. Subclass one, name your
component, and run it with pytest.

    class TestMyParser(ToolParserConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()

Both need ``hypothesis``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotshoe.api import (
    Component,
    ContentDelta,
    ReasoningDelta,
    ReasoningParser,
    ReasoningParserContext,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolDelta,
    ToolParser,
    ToolParserCapabilities,
    ToolParserContext,
)
from hotshoe.api.reasoning_parsers import joined
from hotshoe.api.tool_parsers import collected

WEATHER = Tool(
    name="get_weather",
    description="The weather of a place.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    is_strict=True,
)
CLOCK = Tool(
    name="get_weather_time",  # begins like the other one
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
    is_strict=True,
)
CHOICE = ToolChoice(tools=(WEATHER, CLOCK))

_TEXTS = st.text(st.sampled_from("ab{}[]()<>\"'\\/,:;= \nté😀"), max_size=24)
_ARGUMENTS = st.fixed_dictionaries(
    {"city": _TEXTS}, optional={"unit": st.sampled_from("CF"), "days": st.integers(-9, 99)}
)
_CALLS = st.lists(
    _ARGUMENTS.map(lambda one: ToolCall("get_weather", json.dumps(one)))
    | st.just(ToolCall("get_weather_time", "{}")),
    min_size=1,
    max_size=3,
)
_FEW = settings(
    max_examples=60,
    deadline=None,
    database=None,
    # each subclass runs them on a parser of its own, and no examples are kept
    suppress_health_check=[HealthCheck.differing_executors],
)


class ToolParserConformance:
    """What every tool parser must get right, whatever its format. About two seconds.

    Attributes:
        options: under ``server.tool_parser.options``.
        allows_text_before: whether the format has calls after other text.
    """

    options: ClassVar[dict[str, Any]] = {}
    allows_text_before = True

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def parser(self) -> ToolParser:
        """The parser under test."""
        component = self.component()
        context = ToolParserContext()
        return cast(ToolParser, component.factory(component.options(**self.options), context))

    def fragments(self) -> list[str]:
        """Pieces of the format, of which texts that are almost calls are made."""
        capabilities = self.component().capabilities
        assert isinstance(capabilities, ToolParserCapabilities)
        written = self.parser().write([ToolCall("get_weather", '{"city": "a"}')])
        third = max(len(written) // 3, 1)
        return [
            *capabilities.markers,
            written,
            *(written[start : start + third] for start in range(0, len(written), third)),
        ]

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        component = self.component()
        assert component.contract == "tool_parser/0"
        assert isinstance(component.capabilities, ToolParserCapabilities)

    @_FEW
    @given(calls=_CALLS, is_constrained=st.booleans())
    def test_what_it_writes_it_reads(self, calls: list[ToolCall], is_constrained: bool) -> None:
        if is_constrained:  # then the arguments are JSON, which some formats write otherwise
            calls = [ToolCall(call.name, "{}") for call in calls]
        parsed = self.parser().parse(
            self.parser().write(calls), CHOICE, is_constrained=is_constrained
        )
        assert parsed.content == ""
        assert _loaded(parsed.tool_calls) == _loaded(calls)

    @_FEW
    @given(data=st.data())
    def test_any_split_tells_the_same(self, data: st.DataObject) -> None:
        pieces = data.draw(st.lists(st.sampled_from(self.fragments()) | _TEXTS, max_size=6))
        text = "".join(pieces)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        for is_constrained in (False, True):
            whole = self.parser().parse(text, CHOICE, is_constrained=is_constrained)
            for places in (cuts, range(len(text))):
                deltas = self._streamed(text, places, is_constrained)
                assert collected(deltas) == whole
                _check_order(deltas)

    @_FEW
    @given(text=_TEXTS)
    def test_text_without_calls_is_content_to_the_letter(self, text: str) -> None:
        parsed = self.parser().parse(text, CHOICE)
        assert parsed.tool_calls == ()
        assert parsed.content == text

    def test_text_goes_out_as_it_comes(self) -> None:
        stream = self.parser().stream(CHOICE)
        assert collected(stream.feed("It is sunny")).content == "It is sunny"
        assert collected(stream.feed(" today")).content == " today"
        assert stream.finish() == []

    def test_text_before_calls_is_content_and_the_spaces_between_are_not(self) -> None:
        if not self.allows_text_before:
            return
        written = self.parser().write([ToolCall("get_weather", '{"city": "Oslo"}')])
        parsed = self.parser().parse(f"Let me see.\n\n{written}\n", CHOICE)
        assert parsed.content == "Let me see."
        assert [call.name for call in parsed.tool_calls] == ["get_weather"]

    def test_a_call_that_is_cut_is_given_back_as_content(self) -> None:
        written = self.parser().write([ToolCall("get_weather", '{"city": "Oslo"}')])
        cut = written[: written.index("Oslo") + 2]
        parsed = self.parser().parse(cut, CHOICE)
        assert parsed.tool_calls == ()
        assert parsed.content == cut

    def test_a_call_of_an_unknown_function_is_content(self) -> None:
        written = self.parser().write([ToolCall("rm_rf", '{"city": "Oslo"}')])
        parsed = self.parser().parse(written, CHOICE)
        assert parsed.tool_calls == ()
        assert "rm_rf" in parsed.content

    def test_two_streams_share_nothing(self) -> None:
        parser = self.parser()
        written = parser.write([ToolCall("get_weather", '{"city": "Oslo"}')])
        first, second = parser.stream(CHOICE), parser.stream(CHOICE)
        deltas: list[ToolDelta] = []
        for character in written:
            deltas += first.feed(character)
            assert collected(second.feed("ab")).content == "ab"
        assert len(collected([*deltas, *first.finish()]).tool_calls) == 1
        assert second.finish() == []

    def test_instructions_describe_every_tool(self) -> None:
        told = self.parser().instructions(CHOICE.tools)
        for tool in CHOICE.tools:
            assert tool.name in told
        assert "The weather of a place." in told

    def test_constraints_are_the_same_for_the_same_tools(self) -> None:
        """Backends keep what they compiled by its text."""
        choice = ToolChoice(tools=CHOICE.tools, is_required=True)
        assert self.parser().constraint(choice) == self.parser().constraint(choice)

    def _streamed(self, text: str, cuts: Sequence[int], is_constrained: bool) -> list[ToolDelta]:
        stream = self.parser().stream(CHOICE, is_constrained=is_constrained)
        bounds = [0, *cuts, len(text)]
        deltas: list[ToolDelta] = []
        for start, end in itertools.pairwise(bounds):
            deltas += stream.feed(text[start:end])
        return deltas + stream.finish()


class ReasoningParserConformance:
    """What every reasoning parser must get right, whatever its marks. About a second.

    Attributes:
        options: under ``server.reasoning_parser.options``.
        text: an output with reasoning, its parts, and the prompt's end.
    """

    options: ClassVar[dict[str, Any]] = {}
    prompt_end: ClassVar[str] = "<|assistant|>"
    text: ClassVar[str]
    reasoning: ClassVar[str]
    content: ClassVar[str]

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def parser(self) -> ReasoningParser:
        """The parser under test."""
        component = self.component()
        context = ReasoningParserContext()
        return cast(ReasoningParser, component.factory(component.options(**self.options), context))

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "reasoning_parser/0"

    def test_reasoning_and_answer_are_told_apart(self) -> None:
        parsed = self.parser().parse(self.text, self.prompt_end)
        assert parsed == ReasoningDelta(self.reasoning, self.content)

    @_FEW
    @given(data=st.data())
    def test_any_split_tells_the_same(self, data: st.DataObject) -> None:
        third = max(len(self.text) // 5, 1)
        fragments = [self.text[at : at + third] for at in range(0, len(self.text), third)]
        pieces = data.draw(st.lists(st.sampled_from([*fragments, self.text]) | _TEXTS, max_size=6))
        text = "".join(pieces)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        whole = self.parser().parse(text, self.prompt_end)
        for places in (cuts, range(len(text))):
            stream = self.parser().stream(self.prompt_end)
            bounds = [0, *places, len(text)]
            deltas = [stream.feed(text[start:end]) for start, end in itertools.pairwise(bounds)]
            deltas.append(stream.finish())
            assert joined(deltas) == whole
            answered = [bool(delta.content) for delta in deltas]
            reasoned = [bool(delta.reasoning) for delta in deltas]
            if True in answered:
                assert True not in reasoned[answered.index(True) + 1 :], "reasoning after an answer"

    def test_nothing_is_told_of_nothing(self) -> None:
        assert self.parser().parse("", self.prompt_end) == ReasoningDelta()


def _loaded(calls: Sequence[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _check_order(deltas: Sequence[ToolDelta]) -> None:
    """A call begins with its name, in order, and doesn't go on after the next has begun."""
    num_begun = 0
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text, "an empty delta"
            continue
        assert isinstance(delta, ToolCallDelta)
        if delta.name is not None:
            assert delta.index == num_begun
            num_begun += 1
        assert delta.index == num_begun - 1
