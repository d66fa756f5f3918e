"""``think_tags``: reasoning in ``<think>`` tags, as DeepSeek R1, Qwen 3 and others write it."""

from __future__ import annotations

import json
from typing import Any

from hotshoe.api import (
    Component,
    GrammarSpec,
    PluginOptions,
    ReasoningDelta,
    ReasoningParser,
    ReasoningParserCapabilities,
    ReasoningParserContext,
    ReasoningStream,
    hookimpl,
)

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"


class ThinkTagsOptions(PluginOptions):
    """Options of ``think_tags``.

    Attributes:
        is_start_tag_optional: whether the model reasons from its first word on, with or without a
            start tag. Where the prompt itself ends with the tag that is known without this.
    """

    is_start_tag_optional: bool = False


class ThinkTags(ReasoningParser):
    """What stands between the tags at the start of an answer is its reasoning.

    Spaces around both are left out. Reasoning that is cut stays reasoning.
    """

    def __init__(self, options: ThinkTagsOptions) -> None:
        self._is_start_tag_optional = options.is_start_tag_optional

    def stream(self, prompt_end: str) -> ReasoningStream:
        return ThinkTagsStream(is_open=self._is_open(prompt_end))

    def constraint(self, spec: GrammarSpec, prompt_end: str) -> GrammarSpec | None:
        answer = spec.tag_format()
        if answer is None:
            return None
        reasoning: dict[str, Any] = {
            "type": "sequence",
            "elements": [
                {"type": "any_text", "excludes": [CLOSE]},
                _const(CLOSE),
                {"type": "regex", "pattern": r"\n{0,2}"},
            ],
        }
        if not self._is_open(prompt_end):
            opened = {"type": "sequence", "elements": [_const(OPEN), reasoning]}
            reasoning = {"type": "optional", "content": opened}
        root = {"type": "sequence", "elements": [reasoning, answer]}
        value = json.dumps({"type": "structural_tag", "format": root}, ensure_ascii=False)
        return GrammarSpec(kind="structural_tag", value=value)

    def _is_open(self, prompt_end: str) -> bool:
        opened, closed = prompt_end.rfind(OPEN), prompt_end.rfind(CLOSE)
        if prompt_end.rstrip(_SPACE).endswith(CLOSE):
            return False  # closed in advance: the client wants no reasoning
        return self._is_start_tag_optional or (
            opened > closed and not prompt_end[opened + len(OPEN) :].strip(_SPACE)
        )


class ThinkTagsStream(ReasoningStream):
    """Reads one output.

    Args:
        is_open: whether it begins inside the reasoning.
    """

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        self._is_started = False
        self._is_closed = False
        self._held = ""
        self._at_start = True

    def feed(self, text: str) -> ReasoningDelta:
        return self._read(text, is_over=False)

    def finish(self) -> ReasoningDelta:
        return self._read("", is_over=True)

    def _read(self, text: str, is_over: bool) -> ReasoningDelta:
        self._held += text
        if not self._is_started and not self._start(is_over):
            return ReasoningDelta()
        reasoning = "" if self._is_closed else self._take_reasoning(is_over)
        return ReasoningDelta(reasoning, self._take_content() if self._is_closed else "")

    def _start(self, is_over: bool) -> bool:
        """Decide whether there is reasoning; False if that isn't certain yet."""
        body = self._held.lstrip(_SPACE)
        if body.startswith(OPEN):
            self._held = body[len(OPEN) :]
            self._is_open = True
        elif OPEN.startswith(body) and not is_over:
            return False
        self._is_started = True
        self._is_closed = not self._is_open
        # spaces before an answer without reasoning are the answer's own
        self._at_start = self._is_open
        return True

    def _take_reasoning(self, is_over: bool) -> str:
        if self._at_start:
            self._held = self._held.lstrip(_SPACE)
            if not self._held:
                return ""
            self._at_start = False
        end = self._held.find(CLOSE)
        if end >= 0:
            taken = self._held[:end].rstrip(_SPACE)
            self._held = self._held[end + len(CLOSE) :]
            self._is_closed = self._at_start = True
            return taken
        if is_over:
            taken, self._held = self._held.rstrip(_SPACE), ""
            return taken
        end = len(self._held)
        for place in range(max(0, end - len(CLOSE) + 1), end):
            if CLOSE.startswith(self._held[place:]):
                end = place
                break
        end = len(self._held[:end].rstrip(_SPACE))
        taken, self._held = self._held[:end], self._held[end:]
        return taken

    def _take_content(self) -> str:
        if self._at_start:
            self._held = self._held.lstrip(_SPACE)
            if not self._held:
                return ""
            self._at_start = False
        taken, self._held = self._held, ""
        return taken


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def build(options: ThinkTagsOptions, context: ReasoningParserContext) -> ThinkTags:
    """The parser."""
    return ThinkTags(options)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="reasoning_parser/0",
        factory=build,
        options=ThinkTagsOptions,
        capabilities=ReasoningParserCapabilities(
            template_markers=(OPEN, CLOSE), markers=(OPEN, CLOSE)
        ),
        auto_priority=1,
    )
