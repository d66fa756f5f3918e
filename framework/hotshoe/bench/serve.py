"""``hotshoe bench serve`` without its command line: one load, from warm-up to results."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hotshoe.bench.datasets import PlannedRequest
from hotshoe.bench.load import LoadSettings, RequestRecord, run_load
from hotshoe.bench.machine import describe_versions
from hotshoe.bench.serving_metrics import summarise
from hotshoe.errors import RequestError, UnavailableError
from hotshoe.http_client import HttpClient

WARM_UP_TEXT = "Say something, so that everything that is made at first use is made"
WARM_UP_LEN = 8


async def served_model(client: HttpClient) -> str:
    """The first model that the server lists.

    Raises:
        UnavailableError: if it can't be reached.
        RequestError: if it lists none.
    """
    try:
        answer = await client.request("GET", "/v1/models")
    except OSError as error:
        raise unreachable(client, error) from error
    body = answer.json()
    listed = body.get("data") if isinstance(body, dict) else None
    if answer.status != 200 or not listed:
        hint = (
            "pass it with --api-key or $OPENAI_API_KEY"
            if answer.status in (401, 403)
            else "a server with OpenAI's API lists its models there"
        )
        raise RequestError(
            f"{client.url}/v1/models answered {answer.status}: {answer.error_message}; {hint}"
        )
    return str(listed[0]["id"])


def unreachable(client: HttpClient, error: OSError) -> UnavailableError:
    """What to say of a server that can't be talked to."""
    reason = str(error) or type(error).__name__
    return UnavailableError(f"can't reach {client.url}: {reason}; is a server listening there?")


async def warm_up(client: HttpClient, settings: LoadSettings, count: int) -> None:
    """Send some requests and wait for them; the first one that fails stops the run.

    Raises:
        RequestError: with what the server said.
    """
    request = PlannedRequest(turns=(WARM_UP_TEXT,), output_len=WARM_UP_LEN)
    for record in await run_load(client, [request] * count, settings):
        if record.error is not None:
            raise RequestError(
                f"a warm-up request to {client.url} failed ({record.error}): {record.error_message}"
            )


async def measure_server(
    client: HttpClient,
    requests: Sequence[PlannedRequest],
    settings: LoadSettings,
    *,
    num_warmups: int = 1,
    objectives_ms: Mapping[str, float] | None = None,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Send a load; returns the result as plain data, and what became of each request."""
    server_info = await _server_info(client)
    await warm_up(client, settings, num_warmups)
    started = datetime.now(UTC)
    records = await run_load(client, requests, settings, on_done=on_done)
    result = {
        "time": started.isoformat(timespec="seconds"),
        "url": client.url,
        "endpoint": settings.endpoint,
        "model": settings.model,
        "load": _load_facts(settings, num_warmups),
        "versions": describe_versions(),
        "client_system": platform.platform(),
        "server_info": server_info,
        "summary": summarise(records, objectives_ms),
    }
    return result, records


def _load_facts(settings: LoadSettings, num_warmups: int) -> dict[str, Any]:
    rate = settings.request_rate
    return {
        "request_rate": None if rate == float("inf") else rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "timeout_s": settings.timeout_s,
        "output_len": settings.output_len,
        "fields": dict(settings.fields),
        "num_warmups": num_warmups,
        "seed": settings.seed,
    }


async def _server_info(client: HttpClient) -> Any:
    """What a hotshoe server says of itself; None from others."""
    try:
        async with asyncio.timeout(10):
            answer = await client.request("GET", "/server_info")
    except OSError as error:
        raise unreachable(client, error) from error
    return answer.json() if answer.status == 200 else None
