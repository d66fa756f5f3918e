"""Outputs with reasoning and tool calls in them, as messages and deltas of the chat API."""

from __future__ import annotations

import secrets
import string
import uuid
from typing import Any

from hotshoe.api import ContentDelta, ReasoningStream, ToolCallDelta, ToolCallStream
from hotshoe.server.openai.tools import ToolUse

_ALPHABET = string.ascii_letters + string.digits

Delta = dict[str, Any]


class OutputReader:
    """Reads one choice.

    Args:
        use: what the request says of tools.
        prompt_end: the last characters of the prompt.
    """

    def __init__(self, use: ToolUse, prompt_end: str) -> None:
        parsers, choice = use.parsers, use.choice
        self._id_length = parsers.call_id_length
        self._reasoning: ReasoningStream | None = None
        self._calls: ToolCallStream | None = None
        if parsers.reasoning is not None:
            self._reasoning = parsers.reasoning.stream(prompt_end)
        if parsers.tools is not None and choice is not None:
            self._calls = parsers.tools.stream(choice, is_constrained=use.is_constrained)
        # what is no call is then the beginning of one that was cut
        self._drops_content = choice is not None and choice.is_required
        self._has_content = False
        self.has_calls = False

    @property
    def opening(self) -> Delta:
        """The first delta. There is no content yet where there may never be any."""
        return {"role": "assistant", "content": "" if self._calls is None else None}

    def read(self, text: str, *, is_over: bool) -> list[Delta]:
        """The deltas that more text gives."""
        deltas: list[Delta] = []
        if self._reasoning is not None:
            told = [self._reasoning.feed(text)]
            if is_over:
                told.append(self._reasoning.finish())
            reasoning = "".join(one.reasoning for one in told)
            text = "".join(one.content for one in told)
            if reasoning:
                deltas.append({"reasoning_content": reasoning})
        if self._calls is None:
            return [*deltas, {"content": text}] if text else deltas
        for delta in [*self._calls.feed(text), *(self._calls.finish() if is_over else ())]:
            if not isinstance(delta, ContentDelta):
                deltas += self._call(delta)
            elif not self._drops_content:
                deltas.append({"content": delta.text})
                self._has_content = True
        if is_over and not self._has_content and not self.has_calls:
            deltas.append({"content": ""})  # the answer is an empty text, not none
        return deltas

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of a text."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for delta in self.read(text, is_over=True):
            content.append(delta.get("content", ""))
            reasoning.append(delta.get("reasoning_content", ""))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(content),
            "refusal": None,
        }
        if self._reasoning is not None:
            message["reasoning_content"] = "".join(reasoning) or None
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """A model that has written calls hasn't come to the end of its answer."""
        return "tool_calls" if self.has_calls and reason == "stop" else reason

    def _call(self, delta: ToolCallDelta) -> list[Delta]:
        deltas = []
        if delta.name is not None:
            self.has_calls = True
            begun = {
                "index": delta.index,
                "id": self._new_id(),
                "type": "function",
                "function": {"name": delta.name, "arguments": ""},
            }
            deltas.append({"tool_calls": [begun]})
        if delta.arguments:
            more = {"index": delta.index, "function": {"arguments": delta.arguments}}
            deltas.append({"tool_calls": [more]})
        return deltas

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{uuid.uuid4().hex[:24]}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length))
