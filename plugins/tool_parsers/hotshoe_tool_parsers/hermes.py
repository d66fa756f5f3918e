"""``hermes``: calls as JSON in ``<tool_call>`` tags, as Hermes, Qwen and many others write them."""

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

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = JsonForm("arguments", before="\n")

INSTRUCTIONS = """\
You may call functions to help with the user's question. They are described in <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and its arguments in \
<tool_call></tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}
</tool_call>
The results come in <tool_response></tool_response>. If no function helps, answer without one."""


class Hermes(JsonCallsParser):
    """The format of the Hermes models (Nous Research); the tags needn't be special tokens."""

    form = FORM
    prompt = INSTRUCTIONS
    opening = OPEN
    closing = f"}}\n{CLOSE}"

    def read(self, text: GrowingText, *, is_constrained: bool) -> Generator[None, None, None]:
        while (yield from text.content_until(OPEN)):
            refused = yield from FORM.read(text, is_constrained)
            if refused is None:
                yield from text.space()
                yield from text.word(CLOSE)
            else:
                text.tell(OPEN + refused)
        text.tell_space()

    def constraint(self, choice: ToolChoice) -> GrammarSpec:
        if choice.is_required:
            return tags.spec(tags.calls(choice, "\n", self.tag(choice)))
        return tags.spec(tags.text_with_calls(choice, OPEN, self.tag(choice)))

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}{FORM.write(call)}\n{CLOSE}" for call in calls)


def build(options: PluginOptions, context: ToolParserContext) -> Hermes:
    """The parser; it has no options."""
    return Hermes()


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="tool_parser/0",
        factory=build,
        capabilities=ToolParserCapabilities(template_markers=(OPEN,), markers=(OPEN, CLOSE)),
        auto_priority=1,
    )
