"""Several steps in flight on a worker thread: nothing that a request gets may depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotshoe import LLM, RequestOutput, SamplingParams
from hotshoe.api import Scheduler, StepPlanner, serve
from hotshoe.engine.request import EngineRequest

NUMBERS = random.Random(7)
PROMPTS = [
    [NUMBERS.randrange(256) for _ in range(length)]
    for length in [3, 17, 1, 40, 64, 5, 90, 16, 33, 8, 2, 70]
]
IN_FLIGHT = pytest.mark.parametrize("max_in_flight", [2, 3])

Build = Callable[..., LLM]


@pytest.fixture
def build(tiny_path: Path, threaded_executor: str) -> Iterator[Build]:
    """Builds engines on the tiny model, and closes them after the test."""
    built: list[LLM] = []

    def one(max_in_flight: int = 1, **arguments: Any) -> LLM:
        if max_in_flight > 1:
            options = {"max_in_flight": max_in_flight}
            arguments["executor"] = {"name": threaded_executor, "options": options}
        sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}
        built.append(LLM(str(tiny_path), dtype="float32", **(sizes | arguments)))
        return built[-1]

    yield one
    for llm in built:
        llm.close()


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Iterator[LLM]:
    """One step at a time, and room for everybody."""
    with LLM(str(tiny_path), dtype="float32", max_model_len=256, max_num_seqs=64) as llm:
        yield llm


class Watching(Scheduler):
    """``serve``, noting how many steps were in flight when it was asked."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.in_flight: list[int] = []

    def schedule(self, step: StepPlanner) -> None:
        assert self.llm is not None
        self.in_flight.append(len(self.llm.engine.in_flight))
        serve(step)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in outputs]


def reasons(outputs: list[RequestOutput]) -> list[str | None]:
    return [one.outputs[0].finish_reason for one in outputs]


def assert_all_is_back(llm: LLM) -> None:
    cache = llm.engine.kv_cache
    assert cache.num_free_blocks == cache.num_blocks
    assert not llm.engine.in_flight
    assert not llm.engine.has_work


@IN_FLIGHT
@pytest.mark.parametrize("num_blocks", [None, 18])
def test_greedy_and_seeded_outputs_are_those_of_one_step_at_a_time(
    build: Build, reference: LLM, max_in_flight: int, num_blocks: int | None
) -> None:
    watching = Watching()
    llm = watching.llm = build(
        max_in_flight,
        scheduler=watching,
        cache={"num_blocks": num_blocks},
        max_num_batched_tokens=64,
    )
    params = [
        SamplingParams(
            temperature=index % 2, seed=index, max_tokens=10 + 5 * index, ignore_eos=index % 3 > 0
        )
        for index in range(len(PROMPTS))
    ]
    preempted: list[int] = []
    llm.on_step(lambda record: preempted.append(record.num_preempted))

    outputs = llm.generate(PROMPTS, params)

    expected = reference.generate(PROMPTS, params)
    assert tokens(outputs) == tokens(expected)
    assert reasons(outputs) == reasons(expected)
    assert max(watching.in_flight) == max_in_flight - 1
    assert (sum(preempted) > 0) == (num_blocks is not None)
    assert_all_is_back(llm)


@IN_FLIGHT
def test_end_by_a_stop_token_while_further_steps_are_in_flight(
    build: Build, reference: LLM, max_in_flight: int
) -> None:
    free = reference.generate(PROMPTS, SamplingParams(temperature=1, seed=5, max_tokens=30))
    # each stops at a token that it is known to produce, the first within its first three
    params = [
        SamplingParams(temperature=1, seed=5, max_tokens=30, stop_token_ids=(ids[index % 12],))
        for index, ids in enumerate(tokens(free))
    ]
    llm = build(max_in_flight)

    outputs = llm.generate(PROMPTS, params)

    assert set(reasons(outputs)) == {"stop"}
    assert tokens(outputs) == tokens(reference.generate(PROMPTS, params))
    assert_all_is_back(llm)


@IN_FLIGHT
def test_stop_strings_and_length_limits_hold_while_further_steps_are_in_flight(
    build: Build, reference: LLM, max_in_flight: int
) -> None:
    texts = reference.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    params = [
        SamplingParams(temperature=0, max_tokens=12, stop=[one.text[3:5] or "x"]) for one in texts
    ]
    params += [SamplingParams(temperature=0, max_tokens=length) for length in range(1, 5)]
    params += [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)]
    prompts = [*PROMPTS, *PROMPTS[:4], [1] * 250]
    llm = build(max_in_flight)

    outputs = llm.generate(prompts, params)

    expected = reference.generate(prompts, params)
    assert [one.text for one in outputs] == [one.text for one in expected]
    assert tokens(outputs) == tokens(expected)
    assert [len(ids) for ids in tokens(outputs)[-5:]] == [1, 2, 3, 4, 6]
    assert_all_is_back(llm)


@IN_FLIGHT
@pytest.mark.parametrize("num_blocks", [None, 18])
def test_drafts_are_verified_while_other_requests_go_on(
    build: Build, reference: LLM, max_in_flight: int, num_blocks: int | None
) -> None:
    llm = build(
        max_in_flight,
        spec_decode={"name": "ngram", "adaptive": False},
        cache={"num_blocks": num_blocks},
    )
    # every other request says one thing over and over, which is easy to guess
    params = [
        SamplingParams(
            temperature=index % 3,
            seed=index,
            max_tokens=48,
            logit_bias={65 + index: 12.0} if index % 2 else None,
        )
        for index in range(len(PROMPTS))
    ]
    records: list[Any] = []
    llm.on_step(records.append)

    outputs = llm.generate(PROMPTS, params)

    assert tokens(outputs) == tokens(reference.generate(PROMPTS, params))
    num_drafts = sum(one.num_draft_tokens for one in records)
    assert 20 < sum(one.num_accepted_tokens for one in records) < num_drafts
    assert any(one.num_draft_tokens and len(one.request_ids) > 1 for one in records), (
        "no drafts beside other requests"
    )
    assert_all_is_back(llm)


@IN_FLIGHT
def test_requests_aborted_while_in_flight_harm_no_other(
    build: Build, reference: LLM, max_in_flight: int
) -> None:
    llm = build(max_in_flight, cache={"num_blocks": 30})
    core = llm.engine
    numbers = random.Random(max_in_flight)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
        )
    alive = {str(index) for index in range(0, len(PROMPTS), 2)}
    found: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    num_in_flight = 0
    while core.has_work:
        for update in core.step():
            found[update.request_id] += update.new_token_ids
        num_in_flight = max(num_in_flight, len(core.in_flight))
        if alive and numbers.random() < 0.3:
            core.abort([alive.pop()])

    expected = tokens(reference.generate(PROMPTS, params))
    for index in range(len(PROMPTS)):
        ids = found[str(index)]
        assert ids == expected[index][: len(ids)]
        assert index % 2 == 0 or len(ids) == 20
    assert num_in_flight == max_in_flight - 1
    assert_all_is_back(llm)


@IN_FLIGHT
def test_prompt_logprobs_survive_a_preemption_in_flight(
    build: Build, reference: LLM, max_in_flight: int
) -> None:
    class Preempts(Scheduler):
        """Preempts everybody in the second and the fifth step, in whatever state."""

        num_calls = 0

        def schedule(self, step: StepPlanner) -> None:
            self.num_calls += 1
            if self.num_calls in (2, 5):
                for view in step.running:
                    step.preempt(view)
            serve(step)

    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=2)
    llm = build(max_in_flight, scheduler=Preempts(), max_num_batched_tokens=32)

    outputs = llm.generate(PROMPTS, params)

    for one, other in zip(outputs, reference.generate(PROMPTS, params), strict=True):
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert one.prompt_logprobs[0] is None
        assert len(one.prompt_logprobs) == len(one.prompt_token_ids)
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.token.token_id == theirs.token.token_id
            assert mine.token.logprob == pytest.approx(theirs.token.logprob, abs=1e-4)
        assert len(one.outputs[0].logprobs or []) == 6
    assert_all_is_back(llm)


@IN_FLIGHT
def test_failing_step_fails_its_requests_alone(build: Build, max_in_flight: int) -> None:
    # a recorded step wouldn't call the model
    llm = build(max_in_flight, kernels={"record": False})
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    before = tokens(llm.generate(PROMPTS, params))
    worker = llm.engine.executor._worker  # type: ignore[attr-defined]  # the test's own executor
    forward = worker.parts.model.forward
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return forward(*args)

    worker.parts.model.forward = failing
    outputs = llm.generate(PROMPTS, params, on_error="return")
    failed = [one for one in outputs if one.outputs[0].finish_reason == "error"]
    assert failed
    for one in failed:
        assert "RuntimeError('out of luck')" in (one.outputs[0].error or "")
    for one, expected in zip(outputs, before, strict=True):
        if one not in failed:
            assert one.outputs[0].token_ids == expected
    assert_all_is_back(llm)
    assert tokens(llm.generate(PROMPTS, params)) == before
