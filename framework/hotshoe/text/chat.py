"""Conversations: checked, then rendered by the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotshoe.api import Tool, ToolCall, ToolParser
from hotshoe.errors import RequestError
from hotshoe.text.tokenizer import Tokenizer

_TOOLS_VARIABLE = re.compile(r"\btools\b")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tool_parser: ToolParser | None = None,
    offered_tools: Sequence[Tool] = (),
    **kwargs: Any,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        messages: as in OpenAI's chat API: ``role``, and ``content`` as a text or as text parts.
        tool_parser: writes tools, calls and their results as text for a template that has no
            ``tools``.
        offered_tools: functions that the model may call.
        kwargs: as in ``Tokenizer.apply_chat_template``.

    Raises:
        RequestError: if a message is malformed or holds anything but text, the model has no chat
            template, or the template refuses the conversation.
    """
    normalized = normalize_messages(messages)
    template = kwargs.get("chat_template") or tokenizer.chat_template or ""
    if _TOOLS_VARIABLE.search(template):
        normalized = [_with_loaded_arguments(message) for message in normalized]
        if offered_tools:
            kwargs["tools"] = [_described(tool) for tool in offered_tools]
    elif tool_parser is not None:
        normalized = _with_tools_as_text(normalized, offered_tools, tool_parser)
    return tokenizer.apply_chat_template(normalized, **kwargs)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every content as one text; other fields (``tool_calls``, ...) as they are.

    Raises:
        RequestError: naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages: expected a list of messages, got {type(messages).__name__}; "
            'write [{"role": "user", "content": "..."}]'
        )
    if not messages:
        raise RequestError("messages: the list is empty; send at least one message")
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: got {role!r}, allowed: a non-empty string")
    normalized = dict(message)
    content = message.get("content")
    if content is not None:
        normalized["content"] = _content_text(content, f"{where}.content")
    elif not message.get("tool_calls"):
        raise RequestError(
            f"{where}.content: is missing; only a message with tool_calls may omit it"
        )
    if message.get("tool_calls"):
        _check_tool_calls(message["tool_calls"], f"{where}.tool_calls")
        normalized.setdefault("content", None)
    return normalized


def _check_tool_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"{where}: got {type(calls).__name__}, allowed: a list of calls")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}].function: expected a name and arguments")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping):
            raise RequestError(
                f"{where}[{i}].function.arguments: got {type(arguments).__name__}, allowed: a "
                "JSON object as text"
            )


def _with_loaded_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments as mappings, which is what templates write as JSON; text that is none stays."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _loaded(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or "", "tool_calls": calls}


def _loaded(function: Mapping[str, Any]) -> Any:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            loaded = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return loaded if isinstance(loaded, dict) else arguments
    return arguments


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API has it, which is what templates expect."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": dict(tool.parameters)}}


def _with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], parser: ToolParser
) -> list[dict[str, Any]]:
    """The conversation with nothing in it but roles and texts."""
    written: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        if results:
            written.append({"role": "user", "content": parser.write_results(results)})
            results = []
        written.append(_with_calls_as_text(message, parser))
    if results:
        written.append({"role": "user", "content": parser.write_results(results)})
    return _with_instructions(written, parser.instructions(tools)) if tools else written


def _with_calls_as_text(message: dict[str, Any], parser: ToolParser) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function, arguments = call["function"], _loaded(call["function"])
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(function["name"], arguments))
    parts = [part for part in (message["content"], parser.write(calls)) if part]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def _with_instructions(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """The tools behind the system prompt, or as one."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where}: got {type(content).__name__}, allowed: a string or a list of text parts"
        )
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: expected a content part, got {type(part).__name__}")
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"{where}: parts of type {kind!r} are not supported, this engine serves text only; "
            "allowed: 'text'"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text: got {type(text).__name__}, allowed: a string")
    return text
