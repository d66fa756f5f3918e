"""Many clients at once, some of whom leave and some of whom send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotshoe import LLM, SamplingParams
from server.command import RunningServer, start_server
from server.conftest import LIMITS, wait_until_idle
from server.test_bad_requests import BAD

NUM_CLIENTS, NUM_ROUNDS, NUM_TOKENS = 200, 3, 32
NUM_PROMPTS = 20
MEMORY_GROWTH = 1.05
OF_THE_MODEL = ("259", "out of range", "context length", "bad_words")
"""Words of refusals that only the tiny model's vocabulary and tokenizer bring about."""
NONSENSE = [one for one in BAD if not any(word in one[3] for word in OF_THE_MODEL)]


def processes(pid: int) -> list[int]:
    """A process and all that stem from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes(int(child))
    return found


def memory_kb(pid: int) -> int:
    """Memory of a process and its children, pages that they share counted once."""
    texts = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in processes(pid)]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Pss:")]
    return sum(int(line.split()[1]) for line in lines)


async def one_client(client: httpx.AsyncClient, number: int, chance: random.Random) -> str | None:
    """One request; its text, or None if it was cut short or refused."""
    fate = chance.random()
    if fate < 0.10:
        path, body, _, _ = NONSENSE[chance.randrange(len(NONSENSE))]
        response = await client.post(path, json=body)
        assert 400 <= response.status_code < 500, response.text
        return None
    leaves_after = chance.randrange(1, 20) if fate < 0.25 else None
    body = {"prompt": f"Tell me about the number {number % NUM_PROMPTS}.", "temperature": 0}
    body |= {"max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    text, num_events = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            num_events += 1
            if leaves_after is not None and num_events >= leaves_after:
                return None
            if line == "data: [DONE]":
                return text
            text += json.loads(line[6:])["choices"][0]["text"]
    raise AssertionError("the stream has no end")


async def one_round(url: str, number: int) -> list[str | None]:
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        return await asyncio.gather(
            *[one_client(client, i, random.Random(1000 * number + i)) for i in range(NUM_CLIENTS)]
        )


def expected_texts(model: str, **settings: Any) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [f"Tell me about the number {number}." for number in range(NUM_PROMPTS)]
    with LLM(model, dtype="float32", **settings) as llm:
        return [output.text for output in llm.generate(prompts, params)]


@pytest.fixture(
    params=["tiny", pytest.param("embedded", marks=[pytest.mark.full, pytest.mark.slow])]
)
def model(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The model, and flags of its server."""
    if request.param == "tiny":
        yield str(tiny_path), LIMITS
    else:
        yield "embedded", ("--max-model-len", "256", "--max-num-seqs", "64")


def check_round(running: RunningServer, number: int, expected: list[str]) -> None:
    for index, text in enumerate(asyncio.run(one_round(running.url, number))):
        assert text is None or text == expected[index % NUM_PROMPTS]


@pytest.mark.timeout(1800)
def test_survivors_get_their_text_and_everything_is_given_back(
    model: tuple[str, tuple[str, ...]],
) -> None:
    path, flags = model
    expected = expected_texts(path, max_model_len=256, max_num_seqs=8)
    with (
        start_server(path, *flags) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        baseline = len(processes(running.process.pid))
        check_round(running, 0, expected)
        wait_until_idle(http)
        warm = memory_kb(running.process.pid)
        for number in range(1, NUM_ROUNDS):
            check_round(running, number, expected)
        wait_until_idle(http)
        assert memory_kb(running.process.pid) < warm * MEMORY_GROWTH
        assert len(processes(running.process.pid)) == baseline
        counts = http.get("/metrics").text
        assert 'status="400' in counts
        assert 'status="5' not in counts
