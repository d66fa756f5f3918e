"""``llama3_json``: the whole answer is a call, as Llama 3.1 and later write them:
``{"name": ..., "parameters": ...}``.
"""

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

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = "; "
FORM = JsonForm("parameters")

INSTRUCTIONS = """\
You may call functions to help with the user's question:
{tools}
To call a function, answer with nothing but JSON in this form; put "; " between several calls:
{{"name": "function-name", "parameters": {{"argument-name": "value"}}}}
If no function helps, answer without one."""


class Llama3Json(JsonCallsParser):
    """An answer that begins with a brace or ``<|python_tag|>`` is calls, any other is text."""

    form = FORM
    prompt = INSTRUCTIONS

    def read(self, text: GrowingText, *, is_constrained: bool) -> Generator[None, None, None]:
        taken = yield from text.space()
        if (yield from text.word(PYTHON_TAG)):
            taken += PYTHON_TAG + (yield from text.space())
        while (yield from text.is_at("{")):
            refused = yield from FORM.read(text, is_constrained)
            if refused is not None:
                taken += refused
                break
            taken = yield from text.space()
            if not (yield from text.word(";")):
                break
            taken = ";" + (yield from text.space())
        text.tell(taken)
        yield from text.content_to_end()

    def constraint(self, choice: ToolChoice) -> GrammarSpec:
        calls = tags.calls(choice, SEPARATOR, self.tag(choice))
        return tags.spec(calls if choice.is_required else tags.text_or(calls, "{<"))

    def write(self, calls: Sequence[ToolCall]) -> str:
        return SEPARATOR.join(map(FORM.write, calls))


def build(options: PluginOptions, context: ToolParserContext) -> Llama3Json:
    """The parser; it has no options."""
    return Llama3Json()


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="tool_parser/0",
        factory=build,
        capabilities=ToolParserCapabilities(
            template_markers=(PYTHON_TAG, '"parameters": dictionary of argument name'),
            markers=(PYTHON_TAG,),
        ),
        auto_priority=1,
    )
