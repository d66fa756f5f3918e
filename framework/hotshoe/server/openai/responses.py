"""``POST /v1/responses``: OpenAI's Responses API as far as it is about text.

Nothing is stored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotshoe.api import SamplingParams
from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.generation import Cursor, Generation, usage
from hotshoe.server.openai.prompts import fitted, render, template_kwargs
from hotshoe.server.openai.sampling import metadata_of, responses_params
from hotshoe.server.openai.schemas import ResponsesRequest
from hotshoe.server.openai.service import Service, new_id, request_name
from hotshoe.server.openai.streaming import EventStream, encode, json_response, while_connected
from hotshoe.server.openai.structured import Constraint, constraint_of

_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEM_FIELDS = frozenset({"type", "role", "content", "id", "status"})


async def respond(service: Service, request: Request) -> Response:
    """Handle one request."""
    body = await service.parse(request, ResponsesRequest)
    constraint = constraint_of(body)
    params = responses_params(service.llm, body, constraint)
    timeout_s = service.config.request_timeout_s
    work = _start(service, body, params, constraint, request)
    if not body.stream:
        finished = _finish(service, body, params, work)
        return await while_connected(request, finished, timeout_s=timeout_s)
    generation = await while_connected(request, work, timeout_s=timeout_s)
    writer = _Writer(service, body, params, generation)
    return EventStream(writer.events(), generation.close, timeout_s=timeout_s, failed=writer.failed)


def input_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation of a request, as chat templates know it.

    Raises:
        ApiError: if an item is something else than a message with text.
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
    return messages + [_message(item, f"input.{i}") for i, item in enumerate(body.input)]


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind, role = item.get("type", "message"), item.get("role")
    if kind != "message":
        raise _bad(where, f"items of type {kind!r:.100} are not supported, only 'message'")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", f"got {role!r:.100}, allowed: a non-empty string")
    unknown = sorted(set(item) - _ITEM_FIELDS)
    if unknown:
        raise _bad(f"{where}.{unknown[0]}", "is not supported")
    content = item.get("content")
    if not isinstance(content, str):
        content = _joined_parts(content, f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _joined_parts(content: Any, where: str) -> str:
    if not isinstance(content, list):
        raise _bad(where, "expected a text or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise _bad(where, f"got {part!r:.100}, allowed: parts of type 'input_text'")
        if not isinstance(part.get("text"), str):
            raise _bad(where, f"got a part without text: {part!r:.100}")
        texts.append(part["text"])
    return "".join(texts)


def _bad(where: str, message: str) -> ApiError:
    return invalid(f"{where}: {message}", param=where, code="invalid_value")


async def _start(
    service: Service,
    body: ResponsesRequest,
    params: SamplingParams,
    constraint: Constraint | None,
    request: Request,
) -> Generation:
    metadata = metadata_of(body)
    kwargs = template_kwargs(body.chat_template_kwargs) | {"add_generation_prompt": True}
    prompt = await render(service, input_messages(body), kwargs)
    return await Generation.start(
        service,
        fitted(service, [prompt], params, field="input"),
        params,
        request_id=request_name(request, body),
        priority=body.priority,
        cache_salt=body.cache_salt,
        metadata=metadata,
        span=service.span("chat", request, body, params),
        constraint=constraint,
    )


async def _finish(
    service: Service, body: ResponsesRequest, params: SamplingParams, work: Any
) -> Response:
    generation = await work
    try:
        await generation.finish()
    finally:
        await generation.close()
    return json_response(_Writer(service, body, params, generation).finished())


class _Writer:
    """Writes a response, whole or as events."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        params: SamplingParams,
        generation: Generation,
    ) -> None:
        self._generation = generation
        self._choice = generation.outputs[0].outputs[0]
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._number = 0
        self._base: dict[str, Any] = {
            "id": new_id("resp_", body.request_id),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model_name(body.model),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _text_format(body)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def finished(self) -> dict[str, Any]:
        """The response when the output has ended."""
        choice = self._choice
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        why = {"reason": "max_output_tokens"} if is_cut else None
        message = self._message(choice.text, status)
        return self._response(status, [message], incomplete_details=why, usage=self._usage())

    def failed(self, error: ApiError) -> bytes:
        """The events that end a response that can't be finished."""
        told = {"code": error.code or "server_error", "message": error.message}
        response = self._response("failed", [], error=told)
        return self._event("response.failed", response=response)

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed response, in OpenAI's order."""
        yield self._opening()
        generation, cursor = self._generation, Cursor(self._choice)
        while not cursor.is_finished:
            await generation.wait()
            piece = cursor.take()
            if piece is not None and piece.text:
                yield self._part_event("response.output_text.delta", delta=piece.text, logprobs=[])
        yield self._closing()

    def _opening(self) -> bytes:
        started = self._response("in_progress", [])
        return (
            self._event("response.created", response=started)
            + self._event("response.in_progress", response=started)
            + self._event(
                "response.output_item.added",
                output_index=0,
                item=self._message(None, "in_progress"),
            )
            + self._part_event("response.content_part.added", part=_part(""))
        )

    def _closing(self) -> bytes:
        text, response = self._choice.text, self.finished()
        return (
            self._part_event("response.output_text.done", text=text, logprobs=[])
            + self._part_event("response.content_part.done", part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=response["output"][0])
            + self._event(f"response.{response['status']}", response=response)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        record = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(record) + b"\n\n"

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(
            kind, item_id=self._message_id, output_index=0, content_index=0, **fields
        )

    def _response(self, status: str, output: list[Any], **fields: Any) -> dict[str, Any]:
        unset = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._base, "status": status, "output": output, **unset, **fields}

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [_part(text)],
        }

    def _usage(self) -> dict[str, Any]:
        counted = usage(self._generation.outputs)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return {"type": "text"}
    return wanted.model_dump(by_alias=True, exclude_none=True)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
