"""The items of a Responses request as the messages that chat templates know."""

from __future__ import annotations

from typing import Any

from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.schemas import ResponsesRequest

_TEXT_PARTS = ("input_text", "output_text", "text")
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
_ALL_HAVE = ("type", "id", "status")


def input_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation of a request.

    Raises:
        ApiError: if an item is something else than a message with text, a call, the output of one
            that came before it, or the model's reasoning.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise invalid(
            "input: the list is empty; send at least one message",
            param="input",
            code="invalid_value",
        )
    conversation = _Conversation(messages)
    for index, item in enumerate(body.input):
        conversation.add(item, f"input.{index}")
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # reasoning that led to nothing
    return messages


class _Conversation:
    """Adds items to messages: what the model said in one turn becomes one message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._call_ids: set[str] = set()
        self._is_in_turn = False

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind not in _FIELDS:
            allowed = ", ".join(map(repr, _FIELDS))
            raise _bad(where, f"items of type {kind!r:.100} are not supported, only {allowed}")
        unknown = sorted(set(item) - {*_FIELDS[kind], *_ALL_HAVE})
        if unknown:
            raise _bad(f"{where}.{unknown[0]}", "is not supported")
        getattr(self, f"_add_{kind}")(item, where)

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"{where}.role", f"got {role!r:.100}, allowed: a non-empty string")
        content = item.get("content")
        if not isinstance(content, str):
            content = _joined(content, f"{where}.content", _TEXT_PARTS)
        if role == "assistant" and self._is_in_turn and self._messages[-1]["content"] is None:
            self._messages[-1]["content"] = content
            return
        self._messages.append(
            {"role": "system" if role == "developer" else role, "content": content}
        )
        self._is_in_turn = role == "assistant"

    def _add_function_call(self, item: dict[str, Any], where: str) -> None:
        call_id, name, arguments = (
            _text(item, field, where) for field in ("call_id", "name", "arguments")
        )
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _add_function_call_output(self, item: dict[str, Any], where: str) -> None:
        call_id, output = _text(item, "call_id", where), item.get("output")
        if call_id not in self._call_ids:
            raise _bad(f"{where}.call_id", f"no function_call before it has {call_id!r:.100}")
        if not isinstance(output, str):
            output = _joined(output, f"{where}.output", _TEXT_PARTS)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        self._is_in_turn = False

    def _add_reasoning(self, item: dict[str, Any], where: str) -> None:
        if item.get("summary"):
            raise _bad(f"{where}.summary", "is not supported; send the content")
        content = _joined(item.get("content") or [], f"{where}.content", ("reasoning_text",))
        self._is_in_turn = False
        self._turn()["reasoning_content"] = content

    def _turn(self) -> dict[str, Any]:
        """The message of what the model is saying."""
        if not self._is_in_turn:
            self._messages.append({"role": "assistant", "content": None})
            self._is_in_turn = True
        return self._messages[-1]


def _text(item: dict[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise _bad(f"{where}.{field}", f"got {value!r:.100}, allowed: a non-empty string")
    return value


def _joined(content: Any, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(content, list):
        raise _bad(where, "expected a text or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise _bad(where, f"got {part!r:.100}, allowed: parts of type {kinds[0]!r}")
        if not isinstance(part.get("text"), str):
            raise _bad(where, f"got a part without text: {part!r:.100}")
        texts.append(part["text"])
    return "".join(texts)


def _bad(where: str, message: str) -> ApiError:
    return invalid(f"{where}: {message}", param=where, code="invalid_value")
