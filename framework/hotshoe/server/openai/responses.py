"""``POST /v1/responses``: OpenAI's Responses API as far as it is about text and functions.

Nothing is stored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotshoe.server.openai.errors import ApiError
from hotshoe.server.openai.generation import Cursor, Generation, usage
from hotshoe.server.openai.prompts import fitted, render, template_kwargs
from hotshoe.server.openai.responses_input import input_messages
from hotshoe.server.openai.responses_output import Event, OutputItems
from hotshoe.server.openai.sampling import metadata_of, responses_params
from hotshoe.server.openai.schemas import ResponsesRequest
from hotshoe.server.openai.service import Service, new_id, request_name
from hotshoe.server.openai.streaming import EventStream, encode, json_response, while_connected
from hotshoe.server.openai.structured import constraint_of
from hotshoe.server.openai.tools import ToolUse, prompt_end, tool_use
from hotshoe.server.openai.tools_output import OutputReader


async def respond(service: Service, request: Request) -> Response:
    """Handle one request."""
    body = await service.parse(request, ResponsesRequest)
    use = tool_use(service.parsers, body, constraint_of(body))
    timeout_s = service.config.request_timeout_s
    work = _start(service, body, use, request)
    if not body.stream:
        finished = _finish(service, body, use, work)
        return await while_connected(request, finished, timeout_s=timeout_s)
    generation = await while_connected(request, work, timeout_s=timeout_s)
    writer = _Writer(service, body, use, generation)
    return EventStream(writer.events(), generation.close, timeout_s=timeout_s, failed=writer.failed)


async def _start(
    service: Service, body: ResponsesRequest, use: ToolUse, request: Request
) -> Generation:
    params = responses_params(service.llm, body, use.wanted)
    metadata = metadata_of(body)
    kwargs = template_kwargs(body.chat_template_kwargs) | {
        "add_generation_prompt": True,
        "offered_tools": use.shown,
        "tool_parser": service.parsers.tools,
    }
    prompt = await render(service, input_messages(body), kwargs)
    constraint = use.constraint(prompt_end(service.llm.tokenizer, prompt.token_ids))
    params = use.readable(params, constraint)
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


async def _finish(service: Service, body: ResponsesRequest, use: ToolUse, work: Any) -> Response:
    generation = await work
    try:
        await generation.finish()
    finally:
        await generation.close()
    writer = _Writer(service, body, use, generation)
    writer.read_to_end()
    return json_response(writer.finished())


class _Writer:
    """Writes a response, whole or as events."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        use: ToolUse,
        generation: Generation,
    ) -> None:
        self._generation = generation
        output = generation.outputs[0]
        self._choice = output.outputs[0]
        self._cursor = Cursor(self._choice)
        end = prompt_end(service.llm.tokenizer, output.prompt_token_ids)
        self._reader = OutputReader(use, end)
        self._items = OutputItems()
        self._begins_with_text = use.choice is None and use.parsers.reasoning is None
        self._number = 0
        params = responses_params(service.llm, body)
        self._base: dict[str, Any] = {
            "id": new_id("resp_", body.request_id),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model_name(body.model),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _text_format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{**tool, "strict": _is_strict(tool)} for tool in body.tools or ()],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def finished(self) -> dict[str, Any]:
        """The response when the output has ended."""
        is_cut = self._is_cut
        status = "incomplete" if is_cut else "completed"
        why = {"reason": "max_output_tokens"} if is_cut else None
        items = self._items.items
        return self._response(status, items, incomplete_details=why, usage=self._usage())

    def read_to_end(self) -> None:
        """Take in the whole output, which has ended."""
        for _ in self._read():
            pass

    def failed(self, error: ApiError) -> bytes:
        """The events that end a response that can't be finished."""
        told = {"code": error.code or "server_error", "message": error.message}
        response = self._response("failed", [], error=told)
        return self._event("response.failed", response=response)

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed response, in OpenAI's order."""
        started = self._response("in_progress", [])
        opening = self._event("response.created", response=started)
        opening += self._event("response.in_progress", response=started)
        if self._begins_with_text:
            opening += self._written(self._items.open_message())
        yield opening
        while not self._cursor.is_finished:
            await self._generation.wait()
            data = self._written(self._read())
            if data:
                yield data
        response = self.finished()
        yield self._event(f"response.{response['status']}", response=response)

    @property
    def _is_cut(self) -> bool:
        return self._choice.finish_reason == "length"

    def _read(self) -> Iterator[Event]:
        """The events of what has come since the last time."""
        piece = self._cursor.take()
        if piece is None:
            return
        is_over = piece.finish_reason is not None
        for delta in self._reader.read(piece.text, is_over=is_over):
            yield from self._items.add(delta)
        if is_over:
            yield from self._items.finish(is_cut=self._is_cut)

    def _written(self, events: Iterator[Event]) -> bytes:
        return b"".join(self._event(kind, **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> bytes:
        record = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(record) + b"\n\n"

    def _response(self, status: str, output: list[Any], **fields: Any) -> dict[str, Any]:
        unset = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._base, "status": status, "output": output, **unset, **fields}

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


def _is_strict(tool: dict[str, Any]) -> bool:
    return tool.get("strict") is not False
