"""What the formats have in common in which a call is a JSON object with a name and arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import ClassVar

from hotshoe.api import Tool, ToolCallStream, ToolChoice, ToolParser
from hotshoe_tool_parsers import tags
from hotshoe_tool_parsers.prompting import listed
from hotshoe_tool_parsers.reading import GrowingText, JsonForm


class JsonCallsParser(ToolParser):
    """A parser of such a format.

    Attributes:
        form: of the object.
        prompt: offers ``{tools}``, for models whose template knows none.
        opening: what stands before each object.
        closing: the end of the object, and what follows it.
    """

    form: ClassVar[JsonForm]
    prompt: ClassVar[str]
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = "}"

    @abstractmethod
    def read(self, text: GrowingText, *, is_constrained: bool) -> Generator[None, None, None]:
        """Take an output apart as it grows."""

    def stream(self, choice: ToolChoice, *, is_constrained: bool = False) -> ToolCallStream:
        return GrowingText(choice, partial(self.read, is_constrained=is_constrained))

    def instructions(self, tools: Sequence[Tool]) -> str:
        return self.prompt.format(tools=listed(tools))

    def tag(self, choice: ToolChoice) -> Callable[[Tool], tuple[str, tags.Format, str]]:
        """The begin, content and end of a call of a tool."""

        def tag(tool: Tool) -> tuple[str, tags.Format, str]:
            content = tags.json_format(tags.arguments_schema(choice, tool))
            return self.opening + self.form.begin(tool.name), content, self.closing

        return tag
