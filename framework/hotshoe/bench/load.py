"""The load generator: sends planned requests to an OpenAI-compatible server and takes times."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Any

from hotshoe.bench.datasets import PlannedRequest
from hotshoe.http_client import HttpClient, StreamedResponse, error_message

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""What each endpoint is called on the command line."""

_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How requests are sent.

    Attributes:
        endpoint: ``completions`` or ``chat``.
        model: name that the server knows.
        output_len: of requests that don't say; None: the server's default.
        fields: further fields of every body.
        request_rate: users per second on average, for those without a time of their own;
            infinity: all at once.
        burstiness: shape of the gamma distribution of the gaps between them; 1: a Poisson process,
            less: in bursts, more: evenly.
        max_concurrency: most requests under way; None: no limit.
        timeout_s: longest time for a request; None: no limit.
        seed: of the gaps.
    """

    endpoint: str
    model: str
    output_len: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    timeout_s: float | None = None
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What became of one request. Times are seconds since the start of the load.

    Attributes:
        user: which planned request it belongs to.
        turn: which turn of it.
        planned_s: when its user was to come.
        sent_s: when it was sent; later than planned if too many were under way already.
        token_times_s: when each piece of text came. A piece is one token unless the server drafts
            tokens, or puts several together.
        end_s: when the response was complete.
        num_prompt_tokens: as the server counted them; None if it didn't say.
        num_output_tokens: as the server counted them; pieces if it didn't say.
        num_cached_tokens: prompt tokens that its prefix cache supplied, if it said.
        error: kind of failure: ``http_<status>``, ``connection``, ``timeout``, ``stream`` (an error
            event, or an end too early) or ``skipped`` (an earlier turn failed); None: it succeeded.
        error_message: what was said about it.
    """

    user: int
    turn: int
    planned_s: float
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_message: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None without one."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float:
        """Time to the end of the response."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is no second one."""
        if not self.token_times_s or self.num_output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces of text."""
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def arrival_times(requests: Sequence[PlannedRequest], settings: LoadSettings) -> list[float]:
    """When each user comes, in seconds since the start."""
    random = Random(f"{settings.seed}/arrivals")
    now, times = 0.0, []
    for request in requests:
        if request.arrival_s is not None:
            times.append(request.arrival_s)
            continue
        times.append(now)
        if math.isfinite(settings.request_rate):
            scale = 1 / (settings.request_rate * settings.burstiness)
            now += random.gammavariate(settings.burstiness, scale)
    return times


async def run_load(
    client: HttpClient,
    requests: Sequence[PlannedRequest],
    settings: LoadSettings,
    *,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send every request at its time; returns what became of each, user by user.

    Args:
        on_done: called with each request that ended.
    """
    load = _Load(client, settings, on_done)
    times = arrival_times(requests, settings)
    users = [
        asyncio.create_task(load.be_user(number, request, time))
        for number, (request, time) in enumerate(zip(requests, times, strict=True))
    ]
    try:
        return [record for records in await asyncio.gather(*users) for record in records]
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)


class _Load:
    def __init__(
        self,
        client: HttpClient,
        settings: LoadSettings,
        on_done: Callable[[RequestRecord], None] | None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._on_done = on_done
        self._start = perf_counter()
        limit = settings.max_concurrency
        self._slots = None if limit is None else asyncio.Semaphore(limit)

    async def be_user(
        self, number: int, request: PlannedRequest, planned_s: float
    ) -> list[RequestRecord]:
        """Come at the planned time, and send turn after turn."""
        await asyncio.sleep(max(0.0, planned_s - self._now()))
        records = []
        messages: list[dict[str, Any]] = []
        for turn, content in enumerate(request.turns):
            record = RequestRecord(user=number, turn=turn, planned_s=planned_s)
            records.append(record)
            if turn and records[-2].error is not None:
                record.error, record.error_message = "skipped", "an earlier turn failed"
            else:
                if turn:
                    planned_s = record.planned_s = records[-2].end_s
                messages += _messages(content)
                body = self._body(request, content, messages)
                text = await self._send(body, record)
                messages.append({"role": "assistant", "content": text})
            if self._on_done is not None:
                self._on_done(record)
        return records

    def _now(self) -> float:
        return perf_counter() - self._start

    def _body(
        self, request: PlannedRequest, content: Any, messages: list[dict[str, Any]]
    ) -> dict[str, Any]:
        settings = self._settings
        is_chat = settings.endpoint == "chat"
        body: dict[str, Any] = {"model": settings.model}
        body |= {"messages": messages} if is_chat else {"prompt": content}
        output_len = settings.output_len if request.output_len is None else request.output_len
        if output_len is not None:
            body["max_tokens"] = output_len
        return body | {"stream": True, "stream_options": {"include_usage": True}, **settings.fields}

    async def _send(self, body: dict[str, Any], record: RequestRecord) -> str:
        """Send one request and fill in its record; returns the text that came."""
        pieces: list[str] = []
        async with AsyncExitStack() as stack:
            if self._slots is not None:
                await stack.enter_async_context(self._slots)
            record.sent_s = self._now()
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    path = PATHS[self._settings.endpoint]
                    async with self._client.stream("POST", path, body) as response:
                        await self._read(response, record, pieces)
            except TimeoutError:
                limit = self._settings.timeout_s
                record.error, record.error_message = "timeout", f"no end within {limit} s"
            except OSError as error:
                record.error, record.error_message = "connection", str(error)
            record.end_s = self._now()
        if not record.num_output_tokens:
            record.num_output_tokens = len(record.token_times_s)
        return "".join(pieces)

    async def _read(
        self, response: StreamedResponse, record: RequestRecord, pieces: list[str]
    ) -> None:
        if response.status != 200:
            body = b"".join([part async for part in response.parts()])
            record.error = f"http_{response.status}"
            record.error_message = _error_text(body)
            return
        is_done = False
        async for data in response.events():
            if data == b"[DONE]":
                is_done = True
            else:
                self._take(data, record, pieces)
        if not is_done and record.error is None:
            record.error, record.error_message = "stream", "the stream ended without [DONE]"

    def _take(self, data: bytes, record: RequestRecord, pieces: list[str]) -> None:
        now = self._now()
        try:
            event = json.loads(data)
        except ValueError:
            record.error, record.error_message = "stream", f"an event is no JSON: {data[:80]!r}"
            return
        if "error" in event:
            record.error, record.error_message = "stream", _error_text(data)
            return
        for choice in event.get("choices") or ():
            delta = choice.get("delta", choice)
            if any(delta.get(key) for key in _TEXT_KEYS) or delta.get("text"):
                record.token_times_s.append(now)
                pieces.append(delta.get("text") or delta.get("content") or "")
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        _take_usage(event.get("usage"), record)


def _take_usage(usage: Mapping[str, Any] | None, record: RequestRecord) -> None:
    if usage:
        record.num_prompt_tokens = usage.get("prompt_tokens")
        record.num_output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        record.num_cached_tokens = details.get("cached_tokens")


def _messages(content: Any) -> list[dict[str, Any]]:
    is_chat = isinstance(content, list) and bool(content) and isinstance(content[0], dict)
    return content if is_chat else [{"role": "user", "content": content}]


def _error_text(body: bytes) -> str:
    try:
        said = error_message(json.loads(body))
    except ValueError:
        said = None
    return said or body.decode(errors="replace").strip()[:200]
