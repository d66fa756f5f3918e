"""What a user or a plugin can get wrong: one clear error each, then the next request is served and
every block is back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    Candidates,
    SampleInput,
    Sampler,
    Scheduler,
    StepPlanner,
    StructuredOutputs,
    serve,
)
from hotshoe.engine.request import EngineRequest
from hotshoe.errors import (
    ConfigError,
    KVCacheError,
    RequestError,
    SamplingParamsError,
    SchedulerError,
    SchedulerStalledError,
)
from hotshoe.testing.plugins import make_distribution

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]

FAULTS = """
    from hotshoe.api import (
        Component, DraftTokens, LogitsProcessor, PluginOptions, Proposer, hookimpl
    )

    BAD_TOKEN = 66
    switches = {}

    class Attention:
        @hookimpl
        def hotshoe_component(self):
            from hotshoe_attention import torch_sdpa
            component = torch_sdpa.hotshoe_component()

            def build(options, context):
                backend = component.factory(options, context)
                forward = backend.forward

                def faulty(*args, **kwargs):
                    if switches.get("attention"):
                        raise RuntimeError("CUDA error: an illegal memory access")
                    return forward(*args, **kwargs)

                backend.forward = faulty
                return backend

            return Component(
                contract="attention/0",
                factory=build,
                options=component.options,
                capabilities=component.capabilities,
            )

    class Drafts(Proposer):
        max_draft_tokens = 2

        def propose(self, inputs):
            if "proposer" in switches:
                return switches["proposer"](inputs)
            return DraftTokens(token_ids=[[] for _ in inputs.request_ids])

    class Picky(LogitsProcessor):
        def apply(self, batch):
            for prompt in batch.prompt_token_ids:
                if BAD_TOKEN in prompt:
                    raise ValueError(f"token {BAD_TOKEN} is not to my liking")

    class Broken(LogitsProcessor):
        def apply(self, batch):
            raise ZeroDivisionError("by zero")

    def component(contract, cls):
        class Plugin:
            @hookimpl
            def hotshoe_component(self):
                return Component(
                    contract=contract,
                    factory=lambda options, context: cls(),
                    options=PluginOptions,
                )
        return Plugin()

    attention = Attention()
    drafts = component("spec_decode/0", Drafts)
    picky = component("logits_processor/0", Picky)
    broken = component("logits_processor/0", Broken)
"""


@pytest.fixture(scope="module")
def faulty(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine on plugins that fail when told to."""
    site = make_distribution(
        tmp_path_factory.mktemp("site"),
        name="acme-faults",
        modules={"acme_faults": FAULTS},
        entry_points={
            "hotshoe.attention": {"faulty": "acme_faults:attention"},
            "hotshoe.spec_decode": {"faulty": "acme_faults:drafts"},
            "hotshoe.logits_processors": {
                "picky": "acme_faults:picky",
                "broken": "acme_faults:broken",
            },
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        with LLM(
            str(tiny_path),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            attention="faulty",
            spec_decode={"name": "faulty", "adaptive": False},
            sampler={"logits_processors": [{"name": "picky", "apply": "always"}, "broken"]},
        ) as llm:
            yield llm


@pytest.fixture
def switches(faulty: LLM) -> Iterator[dict[str, Any]]:
    """What is to fail; nothing after the test."""
    found: dict[str, Any] = sys.modules["acme_faults"].switches
    yield found
    found.clear()


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[list[int]]:
    """What the next request gets: greedy and sampled."""
    with LLM(str(tiny_path), dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate([PROMPT, PROMPT], [GREEDY, SAMPLED])
        return [one.outputs[0].token_ids for one in outputs]


@pytest.fixture
def serves_on(expected: list[list[int]]) -> Callable[[LLM], None]:
    """Checks that an engine is as good as new."""

    def check(llm: LLM) -> None:
        cache = llm.engine.kv_cache
        assert cache.num_free_blocks == cache.num_blocks
        assert not llm.engine.requests
        assert not llm.engine.in_flight
        assert llm.engine.executor.call("num_requests").result() == 0
        outputs = llm.generate([PROMPT, PROMPT], [GREEDY, SAMPLED])
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert cache.num_free_blocks == cache.num_blocks

    return check


ServesOn = Callable[[LLM], None]


# requests


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([[]], GREEDY, "the prompt is empty; give at least one token"),
        ([[-1]], GREEDY, "prompt token id -1 is out of range; the model has ids 0 to 258"),
        ([[1, 259]], GREEDY, "prompt token id 259 is out of range"),
        ([[1] * 256], GREEDY, "prompt has 256 tokens but max_model_len is 256"),
        ([[1] * 1000], GREEDY, "prompt has 1000 tokens but max_model_len is 256"),
        (
            [[1] * 251],
            GREEDY,
            r"prompt of 251 tokens \+ max_tokens 6 = 257 exceeds max_model_len 256; lower",
        ),
        (
            [PROMPT],
            SamplingParams(logit_bias={259: 1.0}),
            "logit_bias: got 259, allowed: token ids below 259",
        ),
        (
            [PROMPT],
            SamplingParams(stop_token_ids=(70_000,)),
            "stop_token_ids: got 70000, allowed: token ids below 259",
        ),
        (
            [PROMPT],
            SamplingParams(logits_processors=("polite",)),
            "logits_processors: got 'polite', allowed: loaded processors: none; load more through",
        ),
        ([["a", 1]], GREEDY, "a prompt is a text or a list of token ids"),
    ],
)
def test_request_that_can_not_be_served_is_refused_by_name_and_value(
    llm: LLM, serves_on: ServesOn, prompt: Any, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, params)
    serves_on(llm)


def test_one_bad_prompt_among_many_stops_the_call_before_anything_runs(
    llm: LLM, serves_on: ServesOn
) -> None:
    steps: list[Any] = []
    llm.on_step(steps.append)
    with pytest.raises(RequestError, match="prompt token id 300 is out of range"):
        llm.generate([PROMPT, PROMPT, [300]], GREEDY)
    assert steps == []
    serves_on(llm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0}, r"top_p: got 0, allowed: "),
        ({"top_k": -5}, r"top_k: got -5, allowed: "),
        ({"temperature": math.nan}, r"temperature: got nan, allowed: "),
        ({"temperature": -1}, r"temperature: got -1, allowed: "),
        ({"max_tokens": 0}, r"max_tokens: got 0, allowed: "),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias: got "),
    ],
)
def test_sampling_params_name_the_field_that_is_out_of_range(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**fields)


def test_id_of_a_live_request_is_refused(llm: LLM, serves_on: ServesOn) -> None:
    request = EngineRequest(request_id="twin", prompt_token_ids=PROMPT, sampling_params=GREEDY)
    llm.engine.add_request(request)
    with pytest.raises(RequestError, match="request_id 'twin' is already in use by a live request"):
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.add_request(request)
    llm.engine.abort(["twin", "never heard of"])
    while llm.engine.has_work:
        llm.engine.step()
    serves_on(llm)


def test_malformed_constraint_fails_that_request_alone(
    llm: LLM, serves_on: ServesOn, expected: list[list[int]]
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))
    outputs = llm.generate([PROMPT, PROMPT], [params, GREEDY], on_error="return")
    bad, good = (one.outputs[0] for one in outputs)
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.error.startswith("structured_outputs.regex: ")
    assert bad.error_field == "structured_outputs"
    assert good.token_ids == expected[0]
    serves_on(llm)
    with pytest.raises(RequestError, match=r"structured_outputs\.regex: ") as caught:
        llm.generate(PROMPT, params)
    assert caught.value.field == "structured_outputs"


def test_going_on_after_a_constrained_output_is_refused(llm: LLM, serves_on: ServesOn) -> None:
    constraint = StructuredOutputs(choice=["a"])
    params = SamplingParams(structured_outputs=constraint, ignore_eos=True)
    with pytest.raises(RequestError, match="ignore_eos: got True") as caught:
        llm.generate(PROMPT, params)
    assert caught.value.field == "ignore_eos"
    serves_on(llm)


@pytest.mark.parametrize("cache", [{"num_blocks": 3}, {"memory_gb": 1e-6}])
def test_kv_cache_that_can_not_hold_one_request_stops_the_start(
    tiny_path: Path, cache: dict[str, Any]
) -> None:
    with pytest.raises((ConfigError, KVCacheError), match="max_model_len"):
        LLM(str(tiny_path), dtype="float32", cache=cache)


# logits processors


def test_engine_wide_logits_processor_that_raises_fails_the_requests_concerned(
    faulty: LLM, serves_on: ServesOn, expected: list[list[int]]
) -> None:
    outputs = faulty.generate([PROMPT, [66], [1, 66, 2], PROMPT], GREEDY, on_error="return")
    choices = [one.outputs[0] for one in outputs]
    assert [one.finish_reason for one in choices] == ["length", "error", "error", "length"]
    message = "logits processor 'picky' failed with ValueError: token 66 is not to my liking"
    assert choices[1].error == message
    assert choices[0].token_ids == choices[3].token_ids == expected[0]
    serves_on(faulty)


def test_logits_processor_that_raises_fails_only_those_who_asked_for_it(
    faulty: LLM, serves_on: ServesOn, expected: list[list[int]]
) -> None:
    asks = SamplingParams(temperature=0, max_tokens=6, logits_processors=("broken",))
    outputs = faulty.generate([PROMPT, PROMPT], [asks, GREEDY], on_error="return")
    bad, good = (one.outputs[0] for one in outputs)
    assert bad.error == "logits processor 'broken' failed with ZeroDivisionError: by zero"
    assert good.token_ids == expected[0]
    with pytest.raises(RequestError, match="'broken' failed with ZeroDivisionError"):
        faulty.generate(PROMPT, asks)
    serves_on(faulty)


# samplers


class RaisingSampler(Sampler):
    def candidates(self, inputs: SampleInput) -> Candidates:
        raise ArithmeticError("no luck today")


class WrongShape(Sampler):
    def candidates(self, inputs: SampleInput) -> Candidates:
        raise NotImplementedError

    def draw(self, inputs: SampleInput, uniforms: torch.Tensor) -> torch.Tensor:
        return torch.zeros(7, dtype=torch.int64)


class WrongIds(WrongShape):
    def draw(self, inputs: SampleInput, uniforms: torch.Tensor) -> torch.Tensor:
        return torch.full((inputs.logits.shape[0],), 5000)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (RaisingSampler(), "the step failed in the worker: ArithmeticError"),
        (WrongShape(), r"sampler 'WrongShape' returned torch.int64 of shape \(7,\); allowed: "),
        (WrongIds(), "sampler 'WrongIds' returned token ids from 5000 to 5000; allowed: 0 to 258"),
    ],
)
def test_broken_sampler_fails_its_step_and_can_be_swapped(
    llm: LLM, serves_on: ServesOn, sampler: Sampler, message: str
) -> None:
    llm.use(sampler=sampler)
    try:
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPT, SAMPLED)
        # greedy requests don't need it
        assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 6
    finally:
        llm.use(sampler="standard")
    serves_on(llm)


# attention and drafts


def test_attention_that_raises_fails_the_requests_of_its_step(
    faulty: LLM, switches: dict[str, Any], serves_on: ServesOn
) -> None:
    switches["attention"] = True
    outputs = faulty.generate([PROMPT, [1, 2]], GREEDY, on_error="return")
    for one in outputs:
        assert one.outputs[0].finish_reason == "error"
        assert "RuntimeError('CUDA error: an illegal memory access')" in (
            one.outputs[0].error or ""
        )
    switches.clear()
    serves_on(faulty)


def test_attention_that_raises_in_the_middle_leaves_no_half_computed_prefix(
    faulty: LLM, switches: dict[str, Any], serves_on: ServesOn
) -> None:
    prompt = [*range(67, 150)]
    alone = faulty.generate(prompt, GREEDY)[0].outputs[0].token_ids
    faulty.reset_prefix_cache()
    switches["attention"] = True
    with pytest.raises(RequestError, match="the step failed in the worker"):
        faulty.generate(prompt, GREEDY)
    switches.clear()
    output = faulty.generate(prompt, GREEDY)[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == alone
    serves_on(faulty)


def _raise(inputs: Any) -> Any:
    raise LookupError("lost my notes")


def _drafts(*chains: list[int], parents: Any = None) -> Callable[[Any], Any]:
    from hotshoe.api import DraftTokens

    return lambda inputs: DraftTokens(token_ids=list(chains), parents=parents)


@pytest.mark.parametrize(
    ("propose", "message"),
    [
        (_raise, r"LookupError\('lost my notes'\)"),
        (_drafts(), "proposer Drafts returned drafts for 0 requests, expected 1"),
        (_drafts([1], [2]), "proposer Drafts returned drafts for 2 requests, expected 1"),
        (_drafts([259]), r"proposer Drafts returned \[259\]; allowed: at most 2 ids below 259"),
        (_drafts([-1]), r"proposer Drafts returned \[-1\]; allowed: at most 2 ids below 259"),
        (_drafts([1, 2, 3]), r"proposer Drafts returned \[1, 2, 3\]; allowed: at most 2 ids"),
        (_drafts([1, 2], parents=[[-1, -1]]), "proposer Drafts returned a draft tree"),
        (lambda inputs: None, "the step failed in the worker"),
    ],
)
def test_broken_proposer_fails_its_step(
    faulty: LLM,
    switches: dict[str, Any],
    serves_on: ServesOn,
    propose: Callable[[Any], Any],
    message: str,
) -> None:
    switches["proposer"] = propose
    with pytest.raises(RequestError, match=message):
        faulty.generate(PROMPT, GREEDY)
    switches.clear()
    serves_on(faulty)


def test_nonsense_drafts_change_no_token(
    faulty: LLM, switches: dict[str, Any], serves_on: ServesOn, expected: list[list[int]]
) -> None:
    def nonsense(inputs: Any) -> Any:
        from hotshoe.api import DraftTokens

        return DraftTokens(token_ids=[[7, 7][:most] for most in inputs.max_draft_tokens])

    switches["proposer"] = nonsense
    outputs = faulty.generate([PROMPT, PROMPT], [GREEDY, SAMPLED])
    assert [one.outputs[0].token_ids for one in outputs] == expected
    switches.clear()
    serves_on(faulty)


# schedulers


class Raises(Scheduler):
    num_calls = 0

    def schedule(self, step: StepPlanner) -> None:
        self.num_calls += 1
        serve(step)
        if self.num_calls == 3:
            raise LookupError("no such tenant")


class Sulks(Scheduler):
    num_calls = 0

    def schedule(self, step: StepPlanner) -> None:
        self.num_calls += 1
        if self.num_calls < 3:
            serve(step)


class Rejects(Scheduler):
    def schedule(self, step: StepPlanner) -> None:
        for view in step.waiting:
            if len(step.running) > 0:
                step.reject(view, "one at a time")
            else:
                step.run(view)
        serve(step)


@pytest.mark.parametrize(
    ("scheduler", "kind", "message"),
    [
        (Raises(), SchedulerError, r"scheduler Raises raised LookupError\('no such tenant'\)"),
        (Sulks(), SchedulerStalledError, "scheduler Sulks ran nothing and declared no idling"),
        (Rejects(), RequestError, "rejected by the scheduler: one at a time"),
    ],
)
def test_broken_scheduler_ends_the_call_and_can_be_swapped(
    llm: LLM, serves_on: ServesOn, scheduler: Scheduler, kind: type[Exception], message: str
) -> None:
    llm.use(scheduler=scheduler)
    try:
        with pytest.raises(kind, match=message):
            llm.generate([PROMPT, [1] * 40], GREEDY)
    finally:
        llm.use(scheduler="fcfs")
    serves_on(llm)


# observers


def test_observers_that_raise_are_logged_once_and_harm_nobody(
    tiny_path: Path, serves_on: ServesOn, caplog: pytest.LogCaptureFixture
) -> None:
    def on_step(record: Any) -> None:
        raise ValueError("can't write the trace")

    def on_finish(request: Any) -> None:
        raise ValueError("can't count")

    seen: list[Any] = []
    with LLM(str(tiny_path), dtype="float32", max_model_len=256) as llm:
        llm.on_step(on_step)
        llm.on_finish(on_finish)
        llm.on_finish(seen.append)
        serves_on(llm)
    assert len(seen) == 2
    logged = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(logged) == 2
    assert "on_step" in caplog.text
    assert "can't write the trace" in caplog.text
    assert "on_finish" in caplog.text
