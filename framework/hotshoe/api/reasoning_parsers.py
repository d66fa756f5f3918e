"""Reasoning-parser contract: which part of a text is the model's reasoning, which its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hotshoe.api.guided_decoding import GrammarSpec


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning, the answer, or both; the reasoning comes first."""

    reasoning: str = ""
    content: str = ""


class ReasoningStream(ABC):
    """Reads one output. What it has told in total doesn't depend on how the text was split."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """What is certain now that this text has come."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """What was held back, now that no more text comes. Called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserCapabilities:
    """Of which models a parser reads the output.

    Attributes:
        template_markers: any of these in a chat template says that the model reasons this way, for
            ``server.reasoning_parser.name`` ``auto``.
        markers: texts around the reasoning that may be special tokens of the model: they're kept in
            the text for the parser.
    """

    template_markers: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserContext:
    """Facts a parser may be built on.

    Attributes:
        chat_template: Jinja source; None if the model has none.
    """

    chat_template: str | None = None


class ReasoningParser(ABC):
    """One way to mark reasoning. Built once per server process as ``factory(options,
    ReasoningParserContext)``; keeps no state of requests.
    """

    @abstractmethod
    def stream(self, prompt_end: str) -> ReasoningStream:
        """A reader of one output.

        Args:
            prompt_end: the last characters of the rendered prompt: it may have opened, or closed,
                the reasoning already.
        """

    @abstractmethod
    def constraint(self, spec: GrammarSpec, prompt_end: str) -> GrammarSpec | None:
        """The constraint put on the answer alone, with free reasoning before it; None if this can't
        be said. Then a request with that constraint is refused.
        """

    def parse(self, text: str, prompt_end: str) -> ReasoningDelta:
        """A whole output; what ``stream`` tells, put together."""
        stream = self.stream(prompt_end)
        return joined([stream.feed(text), stream.finish()])


def joined(deltas: Sequence[ReasoningDelta]) -> ReasoningDelta:
    """Deltas put together."""
    return ReasoningDelta(
        "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)
    )
