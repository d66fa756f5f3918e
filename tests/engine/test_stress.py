"""Hundreds of requests on a small KV pool, some of which go away: the others get exactly their
tokens, and nothing is left behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden.comparison import num_common
from golden.oracle import Oracle, draw
from hotshoe import LLM, SamplingParams
from hotshoe.engine.request import EngineRequest
from hotshoe.worker.random import uniforms

MAX_MODEL_LEN = 256


@dataclass(frozen=True)
class Case:
    """A request, and at which of its output tokens its client goes away."""

    prompt: list[int]
    params: SamplingParams
    aborted_at: int | None


def cases(count: int, seed: int) -> list[Case]:
    """Mixed lengths, a third with shared prefixes, half of them sampled, a fifth aborted."""
    numbers = random.Random(seed)
    prefixes = [[numbers.randrange(256) for _ in range(100)] for _ in range(3)]
    made = []
    for index in range(count):
        length = numbers.choice([1, 2, 15, 16, 17, 33, 60, 120])
        prompt = [numbers.randrange(256) for _ in range(length)]
        if index % 3 == 0:
            prompt = prefixes[index % 9 // 3][: numbers.randrange(101)] + prompt[:40]
        num_tokens = numbers.choice([1, 2, 5, 20, 60])
        params = SamplingParams(
            temperature=index % 2,
            seed=index,
            max_tokens=num_tokens,
            ignore_eos=index % 4 > 0,
            stop_token_ids=tuple(range(40)) if index % 10 == 0 else (),
            logit_bias={index % 256: 8.0} if index % 5 == 0 else None,
        )
        aborted_at = numbers.randrange(num_tokens) if numbers.random() < 0.2 else None
        made.append(Case(prompt, params, aborted_at))
    return made


def is_noise(oracle: Oracle, case: Case, output: list[int]) -> bool:
    """Whether float noise may change the token that follows."""
    tokens = [*case.prompt, *output]
    logits = oracle.logits(tokens)[-1].astype(np.float64)
    for token_id, bias in (case.params.logit_bias or {}).items():
        logits[token_id] += bias
    seed, choice, position = (np.array([one]) for one in (case.params.seed, 0, len(tokens)))
    uniform = float(uniforms(seed.astype(np.uint64), choice, position)[0])
    return draw(logits, case.params, uniform).is_near_edge


def serve(llm: LLM, many: list[Case], seed: int) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Tokens and finish reasons, with requests coming a few at a time."""
    core = llm.engine
    numbers = random.Random(seed)
    tokens: dict[int, list[int]] = {index: [] for index in range(len(many))}
    reasons: dict[int, str] = {}
    coming = list(range(len(many)))[::-1]
    while coming or core.has_work:
        for _ in range(min(numbers.randrange(8), len(coming))):
            index = coming.pop()
            core.add_request(
                EngineRequest(
                    request_id=str(index),
                    prompt_token_ids=many[index].prompt,
                    sampling_params=many[index].params,
                    seed=many[index].params.seed,
                )
            )
            if many[index].aborted_at == 0 and numbers.random() < 0.5:
                core.abort([str(index)])
        for update in core.step():
            index = int(update.request_id)
            assert index not in reasons, "an update after the last"
            tokens[index] += update.new_token_ids
            if update.finish_reason is not None:
                reasons[index] = update.finish_reason
        leaving = [
            str(index)
            for index, case in enumerate(many)
            if case.aborted_at is not None and len(tokens[index]) > case.aborted_at
        ]
        core.abort(leaving)
    return tokens, reasons


def check(tiny_path: Path, count: int, seed: int, **arguments: Any) -> list[Any]:
    """Serve ``count`` requests under pressure, and compare with an engine that has room."""
    many = cases(count, seed)
    sizes: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "cache": {"num_blocks": 40},
    }
    records: list[Any] = []
    ended: list[Any] = []
    with LLM(str(tiny_path), **(sizes | arguments)) as llm:
        llm.on_step(records.append)
        llm.on_finish(ended.append)
        tokens, reasons = serve(llm, many, seed)
        cache = llm.engine.kv_cache
        assert cache.num_free_blocks == cache.num_blocks
        assert not llm.engine.requests
        assert not llm.engine.in_flight
        assert llm.engine.executor.call("num_requests").result() == 0

    with LLM(str(tiny_path), dtype="float32", max_model_len=MAX_MODEL_LEN) as roomy:
        expected = roomy.generate([one.prompt for one in many], [one.params for one in many])
    oracle = Oracle.folder(tiny_path)
    num_excused = 0
    for index, (case, output) in enumerate(zip(many, expected, strict=True)):
        found, choice = tokens[index], output.outputs[0]
        wanted = choice.token_ids
        if reasons[index] == "abort":
            assert case.aborted_at is not None
            wanted = wanted[: len(found)]
        place = num_common(found, wanted)
        if place < max(len(found), len(wanted)):
            assert is_noise(oracle, case, wanted[:place]), f"{index} differs at {place}"
            num_excused += 1
        elif reasons[index] != "abort":
            assert reasons[index] == choice.finish_reason, index
    assert num_excused <= count / 100

    num_aborted = list(reasons.values()).count("abort")
    assert 0.1 * count < num_aborted < 0.25 * count
    assert sum(one.num_preempted for one in records) > 0
    assert len(ended) == count
    assert sum(one.num_new_tokens for one in records) == sum(map(len, tokens.values()))
    assert sum(one.num_preemptions for one in ended) == sum(one.num_preempted for one in records)
    return records


Engine = dict[str, Any]


@pytest.fixture
def engines(threaded_executor: str) -> Callable[[str], Engine]:
    """Settings by name."""
    return {
        "fcfs": {},
        "no prefix cache": {"cache": {"num_blocks": 40, "enable_prefix_caching": False}},
        "drafts": {"spec_decode": "ngram"},
        "in flight": {
            "executor": {"name": threaded_executor, "options": {"max_in_flight": 3}},
            "spec_decode": "ngram",
        },
    }.__getitem__


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcfs", "in flight"])
def test_survivors_of_500_requests_get_their_tokens(
    tiny_path: Path, engines: Callable[[str], Engine], name: str
) -> None:
    check(tiny_path, 500, 1, **engines(name))


@pytest.mark.parametrize("name", ["fcfs", "no prefix cache", "drafts", "in flight"])
def test_survivors_of_100_requests_get_their_tokens(
    tiny_path: Path, engines: Callable[[str], Engine], name: str
) -> None:
    check(tiny_path, 100, 2, **engines(name))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 6))
@pytest.mark.parametrize("name", ["fcfs", "no prefix cache", "drafts", "in flight"])
def test_survivors_of_2000_requests_get_their_tokens(
    tiny_path: Path, engines: Callable[[str], Engine], name: str, seed: int
) -> None:
    check(tiny_path, 2000, seed, **engines(name))
