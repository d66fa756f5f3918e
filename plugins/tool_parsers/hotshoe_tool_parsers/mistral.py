"""``mistral``: a list of calls after ``[TOOL_CALLS]``, as Mistral's models write them."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from hotshoe.api import (
    Component,
    GrammarSpec,
    PluginOptions,
    ToolCall,
    ToolChoice,
    ToolParserCapabilities,
    ToolParserContext,
    hookimpl,
)
from hotshoe_tool_parsers import tags
from hotshoe_tool_parsers.json_calls import JsonCallsParser
from hotshoe_tool_parsers.reading import GrowingText, JsonForm

MARKER = "[TOOL_CALLS]"
SEPARATOR = ", "
ID_LENGTH = 9
"""Their templates refuse others."""

FORM = JsonForm("arguments")

INSTRUCTIONS = """\
[AVAILABLE_TOOLS]
{tools}
[/AVAILABLE_TOOLS]
To call functions, write [TOOL_CALLS] and a JSON list of calls:
[TOOL_CALLS] [{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}]
If no function helps, answer without one."""


class Mistral(JsonCallsParser):
    """The format with one list of all calls (tokenizer versions 1 to 7)."""

    form = FORM
    prompt = INSTRUCTIONS

    def read(self, text: GrowingText, *, is_constrained: bool) -> Generator[None, None, None]:
        while (yield from text.content_until(MARKER)):
            taken = MARKER + (yield from text.space())
            if not (yield from text.word("[")):
                text.tell(taken)
                continue
            taken += "["
            while True:
                taken += yield from text.space()
                refused = yield from FORM.read(text, is_constrained)
                if refused is not None:
                    text.tell(taken + refused)
                    break
                yield from text.space()
                if not (yield from text.word(",")):
                    yield from text.word("]")
                    break
                taken = ","
        text.tell_space()

    def constraint(self, choice: ToolChoice) -> GrammarSpec:
        calls = tags.sequence(
            tags.const(f"{MARKER} ["),
            tags.calls(choice, SEPARATOR, self.tag(choice)),
            tags.const("]"),
        )
        return tags.spec(calls if choice.is_required else _after_free_text(calls))

    def write(self, calls: Sequence[ToolCall]) -> str:
        return f"{MARKER} [{SEPARATOR.join(map(FORM.write, calls))}]"


def _after_free_text(calls: tags.Format) -> tags.Format:
    """Text without the marker, then perhaps the calls, which end the answer."""
    free = {"type": "any_text", "excludes": [MARKER]}
    return tags.sequence(free, {"type": "optional", "content": calls})


def build(options: PluginOptions, context: ToolParserContext) -> Mistral:
    """The parser; it has no options."""
    return Mistral()


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="tool_parser/0",
        factory=build,
        capabilities=ToolParserCapabilities(
            template_markers=(MARKER,), markers=(MARKER,), call_id_length=ID_LENGTH
        ),
        auto_priority=1,
    )
