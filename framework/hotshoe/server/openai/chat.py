"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotshoe.server.openai.completions import check_stream_options
from hotshoe.server.openai.generation import Cursor, Generation, Piece, usage
from hotshoe.server.openai.prompts import chat_prompt, fitted
from hotshoe.server.openai.sampling import chat_params, metadata_of
from hotshoe.server.openai.schemas import ChatRequest
from hotshoe.server.openai.service import Service, new_id, request_name
from hotshoe.server.openai.streaming import (
    DONE,
    EventStream,
    event,
    json_response,
    while_connected,
)
from hotshoe.server.openai.structured import constraint_of
from hotshoe.server.openai.tools import ToolUse, prompt_end, tool_use
from hotshoe.server.openai.tools_output import OutputReader


async def chat(service: Service, request: Request) -> Response:
    """Handle one request."""
    body = await service.parse(request, ChatRequest)
    check_stream_options(body)
    use = tool_use(service.parsers, body, constraint_of(body))
    timeout_s = service.config.request_timeout_s
    work = _start(service, body, use, request)
    if not body.stream:
        answer = _finish(service, body, use, work)
        return await while_connected(request, answer, timeout_s=timeout_s)
    generation = await while_connected(request, work, timeout_s=timeout_s)
    events = _Writer(service, body, use, generation).events()
    return EventStream(events, generation.close, timeout_s=timeout_s)


async def _start(service: Service, body: ChatRequest, use: ToolUse, request: Request) -> Generation:
    params = chat_params(service.llm, service.config, body, use.wanted)
    metadata = metadata_of(body)
    prompt = await chat_prompt(service, body, body.messages, use.shown)
    constraint = use.constraint(prompt_end(service.llm.tokenizer, prompt.token_ids))
    params = use.readable(params, constraint)
    return await Generation.start(
        service,
        fitted(service, [prompt], params, truncate=body.truncate_prompt_tokens, field="messages"),
        params,
        request_id=request_name(request, body),
        priority=body.priority,
        cache_salt=body.cache_salt,
        metadata=metadata,
        span=service.span("chat", request, body, params),
        constraint=constraint,
    )


async def _finish(service: Service, body: ChatRequest, use: ToolUse, work: Any) -> Response:
    generation = await work
    try:
        await generation.finish()
    finally:
        await generation.close()
    return json_response(_Writer(service, body, use, generation).whole())


class _Writer:
    """Writes the choices of a generation, whole or piece by piece."""

    def __init__(
        self, service: Service, body: ChatRequest, use: ToolUse, generation: Generation
    ) -> None:
        self._logprobs = service.logprobs
        self._body = body
        self._generation = generation
        self._output = generation.outputs[0]
        self._cursors = [Cursor(choice) for choice in self._output.outputs]
        end = prompt_end(service.llm.tokenizer, self._output.prompt_token_ids)
        self._readers = [OutputReader(use, end) for _ in self._cursors]
        self._base = {
            "id": new_id("chatcmpl-", body.request_id),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name(body.model),
            "system_fingerprint": service.fingerprint,
        }
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats) and self._with_usage

    def whole(self) -> dict[str, Any]:
        """The response to a request that isn't streamed."""
        taken = [cursor.take() for cursor in self._cursors]
        choices = [self._whole_choice(index, piece) for index, piece in enumerate(taken) if piece]
        whole = {**self._base, "choices": choices, "usage": usage([self._output])}
        return whole | self._of_prompt()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed response."""
        generation = self._generation
        is_opened = is_finished = False
        if self._body.prompt_logprobs is None:
            yield self._opening()
            is_opened = True
        while not is_finished:
            await generation.wait()
            is_finished = generation.is_finished
            if not is_opened:
                if self._output.prompt_logprobs is None and not is_finished:
                    continue
                yield self._opening()
                is_opened = True
            data = b"".join([self._next(index) for index in range(len(self._cursors))])
            if data:
                yield data
        if self._with_usage:
            yield event({**self._base, "choices": [], "usage": usage([self._output])})
        yield DONE

    def _opening(self) -> bytes:
        chunks = []
        for index in range(len(self._cursors)):
            delta = self._readers[index].opening
            chunks.append(self._chunk(index, delta, None, extra={} if index else self._of_prompt()))
        return b"".join(chunks)

    def _next(self, index: int) -> bytes:
        piece = self._cursors[index].take()
        if piece is None:
            return b""
        body = self._body
        is_over = piece.finish_reason is not None
        deltas = self._readers[index].read(piece.text, is_over=is_over)
        has_tokens = bool(piece.token_ids) and (
            piece.logprobs is not None or bool(body.return_token_ids)
        )
        if not deltas and has_tokens and not is_over:
            deltas = [{"content": ""}]
        # the tokens of the piece go out once, with its first delta
        chunks = [
            self._chunk(index, delta, None if number else piece)
            for number, delta in enumerate(deltas)
        ]
        if is_over:
            chunks.append(self._chunk(index, {}, None if deltas else piece, end=piece))
        return b"".join(chunks)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        piece: Piece | None,
        *,
        end: Piece | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        body = self._body
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if piece is None else self._written_logprobs(piece),
            "finish_reason": self._readers[index].finish_reason(end.finish_reason) if end else None,
        }
        if end is not None:
            choice["stop_reason"] = end.stop_reason
        if piece is not None and body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        chunk: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = usage([self._output]) if self._continuous else None
        return event(chunk | extra if extra else chunk)

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        reader = self._readers[index]
        choice: dict[str, Any] = {
            "index": index,
            "message": reader.message(piece.text),
            "logprobs": self._written_logprobs(piece),
            "finish_reason": reader.finish_reason(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _written_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        return self._logprobs.chat(piece.logprobs, self._body.top_logprobs or 0)

    def _of_prompt(self) -> dict[str, Any]:
        """What is told of the prompt, if asked for."""
        body, known = self._body, self._output.prompt_logprobs
        told: dict[str, Any] = {}
        if body.return_token_ids:
            told["prompt_token_ids"] = self._output.prompt_token_ids
        if body.prompt_logprobs is not None and known is not None:
            told["prompt_logprobs"] = self._logprobs.prompt(known, body.prompt_logprobs)
        return told
