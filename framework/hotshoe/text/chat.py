"""Conversations: checked, then rendered by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotshoe.errors import RequestError
from hotshoe.text.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **kwargs: Any
) -> list[int]:
    """Token ids of a conversation.

    Args:
        messages: as in OpenAI's chat API: ``role``, and ``content`` as a text or as text parts.
        kwargs: as in ``Tokenizer.apply_chat_template``.

    Raises:
        RequestError: if a message is malformed or holds anything but text, the model has no chat
            template, or the template refuses the conversation.
    """
    return tokenizer.apply_chat_template(normalize_messages(messages), **kwargs)


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
    return normalized


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
