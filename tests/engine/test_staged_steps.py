"""Steps whose inputs lie on a device, recorded in a few sizes and ahead of their tokens: nothing
that a request gets may depend on it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from drafts.heads import write_eagle3, write_medusa
from engine.bucket_parts import BucketKernels, LateStreams, attention
from hotshoe import LLM, RequestOutput, SamplingParams, StructuredOutputs
from hotshoe.api import Scheduler, StepPlanner, serve
from hotshoe.errors import EngineDeadError
from hotshoe.testing.models import write_tiny_checkpoint

NUMBERS = random.Random(11)
PROMPTS = [
    [NUMBERS.randrange(256) for _ in range(length)]
    for length in [3, 17, 1, 40, 64, 5, 90, 16, 33, 8]
]
PARTS: dict[str, Any] = {
    "dtype": "float32",
    "attention": "torch_sdpa",
    "kernels": "torch",
    "sampler": "standard",
}

Build = Callable[..., LLM]


@pytest.fixture
def kernels() -> BucketKernels:
    return BucketKernels()


@pytest.fixture
def build(
    tiny_path: Path, kernels: BucketKernels, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Build]:
    """Builds engines whose steps are staged, and closes them after the test."""
    monkeypatch.setattr("hotshoe.worker.streams.CpuStreams", LateStreams)
    built: list[LLM] = []

    def one(max_in_flight: int = 2, **arguments: Any) -> LLM:
        arguments = {
            "max_model_len": 256,
            "max_num_seqs": 8,
            "executor": {"name": "uniproc", "options": {"max_in_flight": max_in_flight}},
            **arguments,
        }
        parts = PARTS | {"attention": attention(), "kernels": kernels}
        built.append(LLM(str(tiny_path), **(parts | arguments)))
        return built[-1]

    yield one
    for llm in built:
        llm.close()


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Iterator[LLM]:
    """One step at a time on the host's arrays, and room for everybody."""
    with LLM(str(tiny_path), max_model_len=256, max_num_seqs=32, **PARTS) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in outputs]


def assert_all_is_back(llm: LLM) -> None:
    cache = llm.engine.kv_cache
    assert cache.num_free_blocks == cache.num_blocks
    assert not llm.engine.in_flight
    assert llm.engine.executor.call("num_requests").result() == 0


def mixed(index: int, **more: Any) -> SamplingParams:
    """Greedy and drawn by turns, of different lengths; some end by themselves."""
    values: dict[str, Any] = {
        "temperature": index % 2,
        "seed": index,
        "max_tokens": 10 + 5 * index,
        "ignore_eos": index % 3 > 0,
    }
    return SamplingParams(**(values | more))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [None, 18])
def test_tokens_are_those_of_steps_on_the_host(
    build: Build,
    reference: LLM,
    kernels: BucketKernels,
    max_in_flight: int,
    num_blocks: int | None,
) -> None:
    llm = build(max_in_flight, cache={"num_blocks": num_blocks}, max_num_batched_tokens=64)
    params = [mixed(index) for index in range(len(PROMPTS))]
    preempted: list[int] = []
    llm.on_step(lambda record: preempted.append(record.num_preempted))

    outputs = llm.generate(PROMPTS, params)
    again = llm.generate(PROMPTS[::-1], params[::-1])[::-1]

    expected = tokens(reference.generate(PROMPTS, params))
    assert tokens(outputs) == expected
    assert tokens(again) == expected
    assert (sum(preempted) > 0) == (num_blocks is not None)
    assert kernels.num_replays > 30
    if num_blocks is None:
        assert sum(one.outputs[0].metrics.num_cached_tokens for one in again) > 0
    assert_all_is_back(llm)


def test_steps_are_recorded_largest_first_and_padded_to_the_next_size(
    build: Build, reference: LLM, kernels: BucketKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSHOE_KERNELS__RECORD_BATCH_SIZES", "[2, 6]")
    llm = build(max_num_seqs=8)
    assert kernels.sizes == [6, 2]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    counts = []
    for num_reqs in (1, 2, 3, 6, 7):
        before = kernels.num_replays
        prompts = PROMPTS[:num_reqs]
        assert tokens(llm.generate(prompts, params)) == tokens(reference.generate(prompts, params))
        counts.append(kernels.num_replays - before)
    # the first token comes with the prompt; with 2 in flight one more step ends for nothing
    assert counts == [4, 4, 4, 4, 0]


def test_sizes_are_up_to_the_number_of_rows_by_default(
    build: Build, kernels: BucketKernels
) -> None:
    build(max_num_seqs=20)
    assert kernels.sizes == [20, 16, 8, 4, 2, 1]


def test_nothing_is_recorded_if_that_is_switched_off(
    build: Build, reference: LLM, kernels: BucketKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSHOE_KERNELS__RECORD", "false")
    llm = build()
    params = [mixed(index, max_tokens=8) for index in range(len(PROMPTS))]
    assert tokens(llm.generate(PROMPTS, params)) == tokens(reference.generate(PROMPTS, params))
    assert kernels.sizes == []


def test_attention_without_padding_runs_every_step_as_it_is(
    build: Build, reference: LLM, kernels: BucketKernels, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hotshoe.worker"):
        llm = build(attention="torch_sdpa")
    params = [mixed(index, max_tokens=8) for index in range(len(PROMPTS))]
    assert tokens(llm.generate(PROMPTS, params)) == tokens(reference.generate(PROMPTS, params))
    assert kernels.sizes == []
    assert "not recorded: TorchSdpaBackend can't be recorded" in caplog.text


def test_parameters_that_read_tokens_wait_for_them(build: Build, reference: LLM) -> None:
    more: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"bad_words": ["a", "th", "e b"]},
        {"min_tokens": 9, "ignore_eos": False},
        {"logit_bias": {65: 3.0, 66: 4.0}},
        {"structured_outputs": StructuredOutputs(regex="[ab]{3,9}c*"), "ignore_eos": False},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"allowed_token_ids": [65, 66, 67, 68]},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {},
    ]
    # those that read nothing have to be right beside the others, too
    params = [mixed(index, max_tokens=15, **one) for index, one in enumerate(more)]
    llm = build(max_num_batched_tokens=64)

    outputs = llm.generate(PROMPTS, params)

    expected = reference.generate(PROMPTS, params)
    assert tokens(outputs) == tokens(expected)
    for one, other in zip(outputs, expected, strict=True):
        mine, theirs = one.outputs[0].logprobs, other.outputs[0].logprobs
        assert (mine is None) == (theirs is None)
        for left, right in zip(mine or [], theirs or [], strict=True):
            assert left.token.token_id == right.token.token_id
            assert left.token.logprob == pytest.approx(right.token.logprob, abs=1e-4)
        assert len(one.prompt_logprobs or []) == len(other.prompt_logprobs or [])
    assert_all_is_back(llm)


def test_words_are_forbidden_by_tokens_that_came_just_before(build: Build, reference: LLM) -> None:
    free = tokens(reference.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20)))
    # what each would say, two tokens at a time
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=20,
            bad_words_token_ids=tuple(pairwise(ids)),
        )
        for ids in free
    ]
    expected = tokens(reference.generate(PROMPTS, params))
    assert expected != free
    assert tokens(build().generate(PROMPTS, params)) == expected


def test_rows_of_requests_that_ended_in_flight_serve_the_next(build: Build, reference: LLM) -> None:
    free = reference.generate(PROMPTS * 2, SamplingParams(temperature=1, seed=5, max_tokens=30))
    # each stops at a token that it is known to produce, so that somebody always does
    params = [
        SamplingParams(
            temperature=1, seed=5, max_tokens=30, logprobs=0, stop_token_ids=(ids[index % 12],)
        )
        for index, ids in enumerate(tokens(free))
    ]
    llm = build(max_num_seqs=3)

    outputs = llm.generate(PROMPTS * 2, params)

    assert tokens(outputs) == tokens(reference.generate(PROMPTS * 2, params))
    assert {one.outputs[0].finish_reason for one in outputs} == {"stop"}
    assert_all_is_back(llm)


def test_policy_that_preempts_whoever_is_in_flight_changes_no_token(
    build: Build, reference: LLM
) -> None:
    class Preempts(Scheduler):
        """Preempts half of those that run, every third time."""

        num_calls = 0

        def schedule(self, step: StepPlanner) -> None:
            self.num_calls += 1
            if self.num_calls % 3 == 0:
                for view in step.running[::2]:
                    step.preempt(view)
            serve(step)

    llm = build(scheduler=Preempts(), max_num_batched_tokens=32, enable_prefix_caching=False)
    params = [mixed(index, max_tokens=12) for index in range(len(PROMPTS))]
    assert tokens(llm.generate(PROMPTS, params)) == tokens(reference.generate(PROMPTS, params))
    assert_all_is_back(llm)


@pytest.mark.parametrize(
    ("name", "write"),
    [("eagle", write_eagle3), ("medusa", write_medusa), ("draft_model", write_tiny_checkpoint)],
)
def test_drafts_are_made_and_verified_on_staged_steps(
    build: Build, reference: LLM, tmp_path: Path, name: str, write: Callable[[Path], Path]
) -> None:
    options = {"model": str(write(tmp_path / "drafter"))}
    llm = build(
        spec_decode={"name": name, "options": options, "adaptive": False},
        cache={"num_blocks": 40},
    )
    params = [mixed(index, max_tokens=20) for index in range(len(PROMPTS))]
    records: list[Any] = []
    llm.on_step(records.append)

    outputs = llm.generate(PROMPTS, params)

    assert tokens(outputs) == tokens(reference.generate(PROMPTS, params))
    assert sum(one.num_draft_tokens for one in records) > 100
    assert_all_is_back(llm)


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("out of luck"), torch.AcceleratorError("CUDA error: out of memory\nmore")],
    ids=["of Python", "of memory"],
)
def test_failing_step_fails_its_requests_alone_and_in_its_own_result(
    build: Build, kernels: BucketKernels, failure: RuntimeError
) -> None:
    llm = build()
    kernels.failure = failure
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = tokens(llm.generate(PROMPTS[:4], params))
    kernels.fail_after = 5

    outputs = llm.generate(PROMPTS[:4], params, on_error="return")

    failed = [one for one in outputs if one.outputs[0].finish_reason == "error"]
    assert failed
    assert all("out of " in (one.outputs[0].error or "") for one in failed)
    kernels.fail_after = None
    assert tokens(llm.generate(PROMPTS[:4], params)) == before
    assert_all_is_back(llm)


def test_gpu_that_fails_ends_the_engine(build: Build, kernels: BucketKernels) -> None:
    llm = build()
    kernels.fail_after = 3
    kernels.failure = torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6))
    assert str(caught.value) == (
        "the GPU failed, start a new process: CUDA error: device-side assert triggered"
    )


def test_request_without_a_token_to_draw_ends_while_the_others_go_on(
    build: Build, reference: LLM
) -> None:
    nothing_left = SamplingParams(
        temperature=0, max_tokens=8, allowed_token_ids=[65], bad_words=["A"]
    )
    params = [nothing_left, *(mixed(index, max_tokens=8) for index in range(1, 5))]
    llm = build()

    outputs = llm.generate(PROMPTS[:5], params, on_error="return")

    assert "allowed_token_ids, bad_words mask every one" in (outputs[0].outputs[0].error or "")
    expected = reference.generate(PROMPTS[1:5], params[1:])
    assert tokens(outputs[1:]) == tokens(expected)
    assert_all_is_back(llm)


def test_two_steps_are_in_flight_unless_drafts_or_a_cpu_wait_for_each(
    build: Build, tiny_path: Path
) -> None:
    with LLM(str(tiny_path), max_model_len=64, **PARTS) as llm:
        assert llm.engine.executor.max_in_flight == 1
    with LLM(
        str(tiny_path), max_model_len=64, executor={"options": {"max_in_flight": 2}}, **PARTS
    ) as llm:
        assert llm.engine.executor.max_in_flight == 2


def test_time_behind_the_step_before_counts_for_that_step(build: Build) -> None:
    llm = build()
    seconds: list[float] = []
    llm.on_step(lambda record: seconds.append(record.timings_s["total"]))
    started = perf_counter()
    llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(seconds) > 20
    assert sum(seconds) <= perf_counter() - started
