"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotshoe.entrypoints.outputs import RequestOutput
from hotshoe.server.openai.errors import invalid
from hotshoe.server.openai.generation import Cursor, Generation, Piece, usage
from hotshoe.server.openai.logprobs import joined
from hotshoe.server.openai.prompts import Prompt, completion_prompts, fitted
from hotshoe.server.openai.sampling import completion_params, metadata_of
from hotshoe.server.openai.schemas import CompletionRequest, GenerateRequest
from hotshoe.server.openai.service import Service, new_id, request_name
from hotshoe.server.openai.streaming import (
    DONE,
    EventStream,
    event,
    json_response,
    while_connected,
)
from hotshoe.server.openai.structured import constraint_of


async def complete(service: Service, request: Request) -> Response:
    """Handle one request."""
    body = await service.parse(request, CompletionRequest)
    check_stream_options(body)
    timeout_s = service.config.request_timeout_s
    work = _start(service, body, request)
    if not body.stream:
        return await while_connected(request, _finish(service, body, work), timeout_s=timeout_s)
    generation = await while_connected(request, work, timeout_s=timeout_s)
    events = _Writer(service, body, generation).events()
    return EventStream(events, generation.close, timeout_s=timeout_s)


def check_stream_options(body: GenerateRequest) -> None:
    """Options of a stream that isn't wanted are a mistake.

    Raises:
        ApiError: if there are any.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid(
            "stream_options are only for requests with stream true",
            param="stream_options",
            code="invalid_value",
        )


async def _start(service: Service, body: CompletionRequest, request: Request) -> Generation:
    constraint = constraint_of(body)
    params = completion_params(service.llm, service.config, body, constraint)
    metadata = metadata_of(body)
    prompts = await completion_prompts(service, body)
    return await Generation.start(
        service,
        fitted(service, prompts, params, truncate=body.truncate_prompt_tokens),
        params,
        request_id=request_name(request, body),
        priority=body.priority,
        cache_salt=body.cache_salt,
        metadata=metadata,
        span=service.span("text_completion", request, body, params),
        constraint=constraint,
    )


async def _finish(service: Service, body: CompletionRequest, work: Any) -> Response:
    generation = await work
    try:
        await generation.finish()
    finally:
        await generation.close()
    return json_response(_Writer(service, body, generation).whole())


class _Writer:
    """Writes the choices of a generation, whole or piece by piece."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation) -> None:
        self._logprobs = service.logprobs
        self._decode = service.llm.tokenizer.decode
        self._body = body
        self._generation = generation
        self._hides_output = body.max_tokens == 0
        self._head = {
            "id": new_id("cmpl-", body.request_id),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name(body.model),
            "system_fingerprint": service.fingerprint,
        }
        self._choices = [
            _Choice(prompt_index * len(output.outputs) + index, prompt, output, self._cursor(one))
            for prompt_index, (prompt, output) in enumerate(
                zip(generation.prompts, generation.outputs, strict=True)
            )
            for index, one in enumerate(output.outputs)
        ]

    def whole(self) -> dict[str, Any]:
        """The response to a request that isn't streamed."""
        pieces = [(choice, choice.cursor.take()) for choice in self._choices]
        choices = [self._choice(choice, piece) for choice, piece in pieces if piece is not None]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed response."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = with_usage and bool(options and options.continuous_usage_stats)
        generation = self._generation
        is_finished = False
        while not is_finished:
            await generation.wait()
            is_finished = generation.is_finished
            data = []
            for choice in self._choices:
                if not self._may_start(choice):
                    continue
                piece = choice.cursor.take()
                if piece is None or not self._is_worth_sending(piece):
                    continue
                chunk = {**self._head, "choices": [self._choice(choice, piece)]}
                if with_usage:
                    chunk["usage"] = self._usage() if continuous else None
                data.append(event(chunk))
            if data:
                yield b"".join(data)
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _cursor(self, choice: Any) -> Cursor:
        return Cursor(choice, hides_output=self._hides_output)

    def _usage(self) -> dict[str, Any]:
        return usage(self._generation.outputs, hides_output=self._hides_output)

    def _may_start(self, choice: _Choice) -> bool:
        """Whether what its first piece must hold is known: the prompt is scored with choice 0."""
        if choice.output.prompt_logprobs is not None:
            return True
        body = self._body
        return body.prompt_logprobs is None and not (body.echo and body.logprobs is not None)

    def _is_worth_sending(self, piece: Piece) -> bool:
        body = self._body
        return bool(
            piece.text
            or piece.finish_reason
            or (piece.is_first and body.echo)
            or (piece.token_ids and (piece.logprobs is not None or body.return_token_ids))
        )

    def _choice(self, choice: _Choice, piece: Piece) -> dict[str, Any]:
        body = self._body
        text = piece.text
        if piece.is_first and body.echo:
            text = self._echo(choice) + text
        written = {
            "index": choice.index,
            "text": text,
            "logprobs": self._written_logprobs(choice, piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if body.return_token_ids:
            written["token_ids"] = piece.token_ids
            if piece.is_first:
                written["prompt_token_ids"] = choice.prompt.token_ids
        known = choice.output.prompt_logprobs
        if piece.is_first and body.prompt_logprobs is not None and known is not None:
            written["prompt_logprobs"] = self._logprobs.prompt(known, body.prompt_logprobs)
        return written

    def _written_logprobs(self, choice: _Choice, piece: Piece) -> dict[str, Any] | None:
        num_top = self._body.logprobs
        if piece.logprobs is None or num_top is None:
            return None
        known = choice.output.prompt_logprobs
        written = None
        if piece.is_first and self._body.echo and known is not None:
            written = self._logprobs.echoed(choice.prompt.token_ids, known, num_top)
            choice.num_logprob_characters = len(self._echo(choice))
        own = self._logprobs.completion(piece.logprobs, num_top, choice.num_logprob_characters)
        choice.num_logprob_characters += sum(
            self._logprobs.num_characters(entry.token.token_id) for entry in piece.logprobs
        )
        return own if written is None else joined(written, own)

    def _echo(self, choice: _Choice) -> str:
        prompt = choice.prompt
        if prompt.text is not None:
            return prompt.text
        skip = self._body.skip_special_tokens is not False
        return self._decode(prompt.token_ids, skip_special_tokens=skip)


class _Choice:
    """One choice while it is written.

    Attributes:
        index: over all prompts of the request.
        num_logprob_characters: characters of the tokens whose log probabilities were written.
    """

    def __init__(self, index: int, prompt: Prompt, output: RequestOutput, cursor: Cursor) -> None:
        self.index = index
        self.prompt = prompt
        self.output = output
        self.cursor = cursor
        self.num_logprob_characters = 0
