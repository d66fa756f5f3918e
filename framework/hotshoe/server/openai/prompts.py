"""Prompts and conversations as token ids, checked against what the engine can take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hotshoe.api import SamplingParams, Tool
from hotshoe.errors import RequestError
from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.schemas import (
    CompletionRequest,
    Message,
    TemplateFields,
    TokenizeRequest,
)
from hotshoe.server.openai.service import Service

Result = TypeVar("Result")

MAX_INLINE_LENGTH = 4000
"""Longer texts are tokenized in a thread, or every stream would wait for them."""

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "offered_tools",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tool_parser",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        text: None if it came as token ids or as messages.
    """

    token_ids: list[int]
    text: str | None = None


async def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request.

    Raises:
        ApiError: if there are none or too many, or one can't be served.
    """
    many = _listed(request.prompt)
    limit = service.config.max_prompts
    if not 1 <= len(many) <= limit:
        raise _bad_prompt(f"prompt: got {len(many)} prompts, allowed: 1 to {limit}")
    special = request.add_special_tokens is not False
    length = sum(len(one) for one in many if isinstance(one, str))
    return await _aside(length, lambda: [_tokenized(service, one, special) for one in many])


async def chat_prompt(
    service: Service,
    request: TemplateFields | TokenizeRequest,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
) -> Prompt:
    """The prompt of a conversation.

    Args:
        tools: that the model is told of.

    Raises:
        RequestError, ApiError: if the template refuses it, or the request may not say so.
    """
    listed = [_plain(message) for message in messages]
    continues = bool(request.continue_final_message)
    opens = request.add_generation_prompt
    kwargs = template_kwargs(request.chat_template_kwargs)
    kwargs["add_generation_prompt"] = not continues if opens is None else opens
    kwargs["continue_final_message"] = continues
    if request.chat_template is not None:
        if not service.config.client_chat_templates:
            raise invalid(
                "chat_template: this server takes no templates from clients; leave it out, or set "
                "server.client_chat_templates",
                param="chat_template",
                code="unsupported_parameter",
            )
        kwargs["chat_template"] = request.chat_template
    kwargs["offered_tools"] = tools
    kwargs["tool_parser"] = service.parsers.tools
    return await render(service, listed, kwargs)


async def render(
    service: Service, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]
) -> Prompt:
    """The prompt of plain messages."""
    length = sum(len(str(message.get("content"))) for message in messages)
    if "chat_template" in kwargs:
        length = MAX_INLINE_LENGTH + 1
    try:
        ids = await _aside(length, lambda: service.llm.render_chat(messages, **kwargs))
    except RequestError as error:
        raise invalid(str(error), param="messages", code="invalid_value") from error
    return Prompt(ids)


def template_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template.

    Raises:
        ApiError: if one would change how the template is run, not what it says.
    """
    reserved = sorted(_RESERVED & set(given or {}))
    if reserved:
        raise invalid(
            f"chat_template_kwargs: {reserved[0]!r} can't be set there",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return dict(given or {})


def fitted(
    service: Service,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    truncate: int | None = None,
    field: str = "prompt",
) -> list[Prompt]:
    """The prompts, cut if that is wanted, and sure to fit.

    Args:
        truncate: keep so many tokens of each; -1: as many as fit.
        field: where in the request they came from.

    Raises:
        ApiError: if one is empty, has ids that no token has, or doesn't fit beside its output.
    """
    limit = service.llm.facts.max_model_len
    room = limit - (params.max_tokens or 1)
    if truncate is not None:
        if truncate == 0:
            raise invalid(
                "truncate_prompt_tokens: got 0, allowed: at least 1, or -1 for what fits",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        keep = max(room, 1) if truncate == -1 else truncate
        prompts = [_cut(one, keep) for one in prompts]
    for prompt in prompts:
        _check(prompt.token_ids, service.llm.facts.vocab_size, field)
        if len(prompt.token_ids) > room:
            raise _too_long(len(prompt.token_ids), params.max_tokens, limit, field)
    return list(prompts)


def _cut(prompt: Prompt, keep: int) -> Prompt:
    if len(prompt.token_ids) <= keep:
        return prompt
    return Prompt(prompt.token_ids[-keep:])


def _check(token_ids: list[int], vocab_size: int, field: str) -> None:
    if not token_ids:
        message = f"{field}: is empty; send at least one token"
        raise invalid(message, param=field, code="invalid_value")
    largest = max(token_ids)
    if largest >= vocab_size:
        raise _bad_prompt(
            f"prompt: token id {largest} is out of range; the model has 0 to {vocab_size - 1}"
        )


def _too_long(num_tokens: int, max_tokens: int | None, limit: int, field: str) -> ApiError:
    wanted = f" and max_tokens is {max_tokens}" if max_tokens else ""
    return invalid(
        f"the prompt has {num_tokens} tokens{wanted}, but the model's context length is {limit}; "
        "shorten the prompt or lower max_tokens",
        param=field if num_tokens >= limit else "max_tokens",
        code="context_length_exceeded",
    )


def _listed(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def _tokenized(service: Service, prompt: str | list[int], special: bool) -> Prompt:
    if isinstance(prompt, str):
        ids = service.llm.tokenizer.encode(prompt, add_special_tokens=special)
        return Prompt(ids, prompt)
    return Prompt(prompt)


def _plain(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_unset=True)
    if plain["role"] == "developer":
        plain["role"] = "system"  # what templates call it
    return plain


async def _aside(length: int, work: Callable[[], Result]) -> Result:
    if length <= MAX_INLINE_LENGTH:
        return work()
    return await asyncio.to_thread(work)


def _bad_prompt(message: str) -> ApiError:
    return invalid(message, param="prompt", code="invalid_value")
