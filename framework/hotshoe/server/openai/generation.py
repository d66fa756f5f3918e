"""The prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hotshoe.api import PositionLogprobs, SamplingParams
from hotshoe.entrypoints.async_llm import RequestStream
from hotshoe.entrypoints.outputs import CompletionOutput, RequestOutput
from hotshoe.server.openai.errors import ApiError, invalid, later
from hotshoe.server.openai.prompts import Prompt
from hotshoe.server.openai.service import Service
from hotshoe.server.openai.structured import Constraint
from hotshoe.tracing import RequestSpan

logger = logging.getLogger(__name__)


class Generation:
    """Several prompts, each with ``n`` choices. Start it, read it, and close it whatever happens.

    Attributes:
        prompts: as they were given.
        outputs: one per prompt; they grow.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        streams: Sequence[RequestStream],
        span: RequestSpan,
        *,
        constraint: Constraint | None = None,
        logs_outputs: bool = False,
    ) -> None:
        self.prompts = prompts
        self.outputs = [stream.output for stream in streams]
        self._streams = streams
        self._changed = streams[0].changed
        self._span = span
        self._constraint = constraint
        self._logs_outputs = logs_outputs

    @classmethod
    async def start(
        cls,
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int | None,
        cache_salt: str | None,
        metadata: Mapping[str, Any],
        span: RequestSpan,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Queue all prompts; returns once the engine has taken them, all or none.

        With a constraint it returns once that is compiled and has brought something, so that one
        that can't be enforced is refused before an answer begins.

        Args:
            span: of the request in a trace; ended here if it is refused, else by ``close``.
            constraint: the one in ``params``.

        Raises:
            HotshoeError, ApiError: if one is refused.
        """
        try:
            streams = await cls._submit(
                service,
                prompts,
                params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                metadata=metadata,
            )
            logs_outputs = service.config.log_prompts
            generation = cls(
                prompts, streams, span, constraint=constraint, logs_outputs=logs_outputs
            )
            if constraint is not None:
                await generation._begin()
        except BaseException as error:
            span.fail(error)
            raise
        return generation

    async def _begin(self) -> None:
        try:
            await self.wait()
        except BaseException as error:
            self._span.fail(error)
            await self.close()
            raise
        # what has come is still to be read
        self._changed.set()

    @staticmethod
    async def _submit(
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int | None,
        cache_salt: str | None,
        metadata: Mapping[str, Any],
    ) -> list[RequestStream]:
        _check_number(len(prompts) * params.n, service.config.max_queue)
        changed = asyncio.Event()
        # together, because the engine answers once a step
        results = await _settled(
            [
                service.llm.submit(
                    prompt.token_ids,
                    params,
                    request_id=request_id,
                    priority=priority or 0,
                    cache_salt=cache_salt,
                    metadata=metadata,
                    changed=changed,
                )
                for prompt in prompts
            ]
        )
        streams = [one for one in results if isinstance(one, RequestStream)]
        errors = [one for one in results if isinstance(one, BaseException)]
        if errors:
            for stream in streams:
                await stream.close()
            raise errors[0]
        return streams

    @property
    def is_finished(self) -> bool:
        """Whether every choice of every prompt has ended."""
        return all(output.finished for output in self.outputs)

    async def wait(self) -> None:
        """Wait until some output has changed since the last call.

        Raises:
            EngineDeadError: if the engine dies.
            ApiError: if a choice failed.
        """
        await self._changed.wait()
        self._changed.clear()
        self.check()

    def check(self) -> None:
        """Make sure that nothing has gone wrong.

        Raises:
            EngineDeadError: if outputs are unfinished and the engine is dead.
            ApiError: if a choice failed.
        """
        for stream in self._streams:
            stream.check()
            for choice in stream.output.outputs:
                if choice.finish_reason in ("error", "abort"):
                    raise self._failure(choice)

    def _failure(self, choice: CompletionOutput) -> ApiError:
        if choice.finish_reason == "abort":
            return ApiError(503, "the request was aborted by the server", code="aborted")
        message = choice.error or "the engine failed on this request"
        if choice.is_unavailable:
            return later(503, message, "unavailable")
        if choice.error_field is None:
            return ApiError(500, message, code="engine_error")
        if self._constraint is not None and choice.error_field.startswith("structured_outputs"):
            return self._constraint.explained(message)
        return invalid(message, param=choice.error_field, code="invalid_value")

    async def finish(self) -> list[RequestOutput]:
        """Wait for everything; returns the outputs."""
        while not self.is_finished:
            await self.wait()
        self.check()
        return self.outputs

    async def close(self) -> None:
        """Abort what is unfinished."""
        for stream in self._streams:
            await stream.close()
        if self.is_finished:
            self._span.finish(self.outputs)
        else:
            self._span.fail("aborted")
        if self._logs_outputs:
            self._logs_outputs = False
            for output in self.outputs:
                texts = [choice.text for choice in output.outputs]
                logger.debug("request %s answered %r", output.request_id, texts)


class Piece:
    """What is new of a choice.

    Attributes:
        is_first: whether nothing of the choice was taken before.
    """

    __slots__ = ("finish_reason", "is_first", "logprobs", "stop_reason", "text", "token_ids")

    def __init__(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[PositionLogprobs] | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
        is_first: bool,
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.is_first = is_first


class Cursor:
    """Reads one growing choice piece by piece.

    Args:
        hides_output: for requests that only score their prompt: the one token that it took is
            left out.
    """

    def __init__(self, choice: CompletionOutput, *, hides_output: bool = False) -> None:
        self._choice = choice
        self._hides_output = hides_output
        self._num_characters = 0
        self._num_tokens = 0
        self._is_first = True
        self.is_finished = False

    def take(self) -> Piece | None:
        """What has come since the last call; None if nothing, not even tokens."""
        choice = self._choice
        num_tokens, is_over = len(choice.token_ids), choice.finish_reason is not None
        if self.is_finished or (
            num_tokens == self._num_tokens
            and not is_over
            and len(choice.text) == self._num_characters
        ):
            return None
        is_first, self._is_first = self._is_first, False
        self.is_finished = is_over
        if self._hides_output:
            none: list[PositionLogprobs] = []
            logprobs = None if choice.logprobs is None else none
            return Piece("", [], logprobs, "length" if is_over else None, None, is_first)
        start, self._num_tokens = self._num_tokens, num_tokens
        text = choice.text[self._num_characters :]
        self._num_characters += len(text)
        return Piece(
            text,
            choice.token_ids[start:],
            None if choice.logprobs is None else choice.logprobs[start:num_tokens],
            choice.finish_reason,
            choice.stop_reason,
            is_first,
        )


def usage(outputs: Sequence[RequestOutput], *, hides_output: bool = False) -> dict[str, Any]:
    """Tokens of all prompts and choices so far; a prompt counts once, whatever its ``n``."""
    num_prompt = sum(len(one.prompt_token_ids) for one in outputs)
    num_output = 0
    if not hides_output:
        num_output = sum(len(choice.token_ids) for one in outputs for choice in one.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.num_cached_tokens for one in outputs),
        },
    }


def _check_number(number: int, limit: int) -> None:
    if number > limit:
        raise invalid(
            f"n times the number of prompts is {number}, but server.max_queue allows {limit}; "
            "send fewer at once",
            param="n",
            code="invalid_value",
        )


async def _settled(coroutines: list[Any]) -> list[Any]:
    """Results and errors of all; if this is cancelled, so are they, and what came is closed."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, RequestStream):
                await result.close()
        raise
