"""Tool-parser contract: how a model writes calls of functions, read from its text as it grows,
and said as a constraint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotshoe.api.guided_decoding import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, ``_`` and ``-``; 1 to 64 of them.
        description: for the model; None if the client gave none.
        parameters: JSON schema of the arguments, which are an object.
        is_strict: whether the client wants the arguments to follow the schema in any case.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What one request allows.

    Attributes:
        tools: that may be called; only the named one if the client named one.
        is_required: whether the output must be calls and nothing else.
        allows_parallel: whether there may be several calls.
    """

    tools: tuple[Tool, ...]
    is_required: bool = False
    allows_parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote.

    Attributes:
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole text, taken apart."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The beginning or more of a call.

    Attributes:
        index: of the call, from 0; no call goes on once the next one has begun.
        name: of the function in the first delta of a call, None in all others.
        arguments: the next piece of the JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


ToolDelta = ContentDelta | ToolCallDelta


class ToolCallStream(ABC):
    """Reads one output. What it has told in total doesn't depend on how the text was split."""

    @abstractmethod
    def feed(self, text: str) -> list[ToolDelta]:
        """What is certain now that this text has come, in the order of the text."""

    @abstractmethod
    def finish(self) -> list[ToolDelta]:
        """What was held back, now that no more text comes. Called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserCapabilities:
    """Of which models a parser reads the output.

    Attributes:
        template_markers: any of these in a chat template says that the model was trained on this
            format, for ``server.tool_parser.name`` ``auto``.
        markers: texts around calls that may be special tokens of the model: they're kept in the
            text for the parser.
        call_id_length: how many letters and digits the template wants as the id of a call; None: it
            doesn't care.
    """

    template_markers: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    call_id_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserContext:
    """Facts a parser may be built on.

    Attributes:
        chat_template: Jinja source; None if the model has none.
    """

    chat_template: str | None = None


class ToolParser(ABC):
    """One format of calls. Built once per server process as ``factory(options,
    ToolParserContext)``; keeps no state of requests.
    """

    @abstractmethod
    def stream(self, choice: ToolChoice, *, is_constrained: bool = False) -> ToolCallStream:
        """A reader of one output.

        Args:
            choice: what the request allows. Calls of other functions are content.
            is_constrained: whether the text follows ``constraint(choice)``, so that arguments may
                be told while they grow; else only whole calls are told, and what doesn't make a
                call is content.
        """

    @abstractmethod
    def constraint(self, choice: ToolChoice) -> GrammarSpec | None:
        """What an output must follow to be calls that this parser reads, with arguments that follow
        the schemas: nothing but calls if ``choice.is_required``, else free text in which a call,
        once it has begun, does. None if this format can't say it; then the request is refused.

        Raises:
            RequestError: if a schema can't be said in this format, naming the keyword.
        """

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """A system prompt that offers the tools, for models whose template doesn't know any."""

    @abstractmethod
    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model would have written them, for templates that know no tools. ``stream``
        reads it back.
        """

    def write_results(self, results: Sequence[str]) -> str:
        """What calls have returned, in their order, as a message to the model, for such
        templates.
        """
        return "\n".join(f"<tool_response>\n{one}\n</tool_response>" for one in results)

    def parse(self, text: str, choice: ToolChoice, *, is_constrained: bool = False) -> ParsedOutput:
        """A whole output; what ``stream`` tells, put together."""
        stream = self.stream(choice, is_constrained=is_constrained)
        return collected([*stream.feed(text), *stream.finish()])


def collected(deltas: Sequence[ToolDelta]) -> ParsedOutput:
    """Deltas put together."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
            continue
        if delta.name is not None:
            names.append(delta.name)
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    calls = [ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return ParsedOutput("".join(content), tuple(calls))
