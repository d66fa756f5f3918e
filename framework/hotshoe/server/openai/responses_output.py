"""The output of a response as items: messages, function calls and reasoning, with their events."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from hotshoe.server.openai.tools_output import Delta

Event = tuple[str, dict[str, Any]]
"""The type of an event, and its fields besides the number."""


class OutputItems:
    """Turns deltas into items, one after the other.

    Attributes:
        items: those that have ended, as the response has them.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._current: _Item | None = None

    def open_message(self) -> Iterator[Event]:
        """Begin with a message, where there can be nothing else."""
        yield from self._open(_Message())

    def add(self, delta: Delta) -> Iterator[Event]:
        """More of the output."""
        if delta.get("reasoning_content"):
            yield from self._more(_Reasoning, delta["reasoning_content"])
        if delta.get("content"):
            yield from self._more(_Message, delta["content"])
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._open(_Call(call["id"], function["name"]))
            if function["arguments"]:
                assert self._current is not None  # the beginning of the call
                yield from self._current.grow(function["arguments"])

    def finish(self, *, is_cut: bool) -> Iterator[Event]:
        """The output has ended.

        Args:
            is_cut: whether in the middle of what the model wrote.
        """
        if self._current is None and not self.items:
            yield from self.open_message()  # the answer is an empty text, not none
        yield from self._close("incomplete" if is_cut else "completed")

    def _more(self, kind: type[_Message] | type[_Reasoning], text: str) -> Iterator[Event]:
        if not isinstance(self._current, kind):
            yield from self._open(kind())
        assert self._current is not None
        yield from self._current.grow(text)

    def _open(self, item: _Item) -> Iterator[Event]:
        yield from self._close("completed")
        item.index = len(self.items)
        self._current = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        if self._current is not None:
            yield from self._current.end(status)
            self.items.append(self._current.shown(status))
            self._current = None


class _Item(ABC):
    """An item that grows."""

    prefix = ""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.index = 0
        self.text = ""

    def begin(self) -> Iterator[Event]:
        yield (
            "response.output_item.added",
            {
                "output_index": self.index,
                "item": self.shown("in_progress"),
            },
        )

    def grow(self, text: str) -> Iterator[Event]:
        self.text += text
        yield from self.grown(text)

    def end(self, status: str) -> Iterator[Event]:
        yield from self.ended()
        yield (
            "response.output_item.done",
            {
                "output_index": self.index,
                "item": self.shown(status),
            },
        )

    @abstractmethod
    def grown(self, text: str) -> Iterator[Event]:
        """The events of more text."""

    @abstractmethod
    def ended(self) -> Iterator[Event]:
        """The events before the last one."""

    @abstractmethod
    def shown(self, status: str) -> dict[str, Any]:
        """As it is in a response."""

    def event(self, kind: str, **fields: Any) -> Event:
        return kind, {"item_id": self.id, "output_index": self.index, **fields}


class _Message(_Item):
    prefix = "msg"

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield self.event("response.content_part.added", content_index=0, part=_part(""))

    def grown(self, text: str) -> Iterator[Event]:
        yield self.event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def ended(self) -> Iterator[Event]:
        text = self.text
        yield self.event("response.output_text.done", content_index=0, text=text, logprobs=[])
        yield self.event("response.content_part.done", content_index=0, part=_part(text))

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [_part(self.text)],
        }


class _Reasoning(_Item):
    prefix = "rs"

    def grown(self, text: str) -> Iterator[Event]:
        yield self.event("response.reasoning_text.delta", content_index=0, delta=text)

    def ended(self) -> Iterator[Event]:
        yield self.event("response.reasoning_text.done", content_index=0, text=self.text)

    def shown(self, status: str) -> dict[str, Any]:
        part = {"type": "reasoning_text", "text": self.text}
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [] if status == "in_progress" else [part],
        }


class _Call(_Item):
    prefix = "fc"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id = call_id
        self._name = name

    def grown(self, text: str) -> Iterator[Event]:
        yield self.event("response.function_call_arguments.delta", delta=text)

    def ended(self) -> Iterator[Event]:
        yield self.event(
            "response.function_call_arguments.done", name=self._name, arguments=self.text
        )

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
