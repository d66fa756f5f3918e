"""Step and finish observers: what they are told adds up to what was served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import FinishedRequest, StepRecord
from hotshoe.engine.request import EngineRequest
from hotshoe.errors import PluginNotFoundError
from hotshoe.testing.plugins import make_distribution

PROMPTS = [[index, *range(40)][: 3 * index + 1] for index in range(12)]


def params(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def pressed(tiny_path: Path, **arguments: Any) -> LLM:
    """An engine with little room."""
    return LLM(
        str(tiny_path),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        cache={"num_blocks": 9, "block_size": 8, "enable_prefix_caching": False},
        **arguments,
    )


def test_records_of_all_steps_add_up(tiny_path: Path) -> None:
    steps: list[StepRecord] = []
    ended: list[FinishedRequest] = []
    with pressed(tiny_path, spec_decode={"name": "ngram", "adaptive": False}) as llm:
        llm.on_step(steps.append)
        llm.on_finish(ended.append)
        outputs = llm.generate(PROMPTS, params())

    assert [one.step_id for one in steps] == sorted({one.step_id for one in steps})
    for one in steps:
        assert one.num_prefill_tokens + one.num_decode_tokens == sum(one.num_scheduled_tokens)
        assert len(one.request_ids) == len(one.num_scheduled_tokens)
        assert 0 <= one.num_free_blocks <= one.num_blocks == 9
        assert one.num_accepted_tokens <= one.num_draft_tokens
        assert one.timings_s.keys() >= {"plan", "commit", "forward", "total"}
    assert sum(one.num_new_tokens for one in steps) == 20 * len(PROMPTS)
    num_preemptions = [one.outputs[0].metrics.num_preemptions for one in outputs]  # type: ignore[union-attr]
    assert sum(one.num_preempted for one in steps) == sum(num_preemptions) > 0
    num_drafts = [one.outputs[0].metrics.num_draft_tokens for one in outputs]  # type: ignore[union-attr]
    num_accepted = [one.outputs[0].metrics.num_accepted_tokens for one in outputs]  # type: ignore[union-attr]
    assert sum(one.num_draft_tokens for one in steps) == sum(num_drafts) > 0
    assert sum(one.num_accepted_tokens for one in steps) == sum(num_accepted)
    assert max(one.num_running for one in steps) > 1
    assert max(one.num_waiting for one in steps) > 0
    last = steps[-1]
    assert (last.num_running, last.num_waiting, last.num_free_blocks) == (0, 0, 9)
    assert sorted(one.num_preemptions for one in ended) == sorted(num_preemptions)


def test_prompts_that_are_computed_again_count_as_no_new_prefill(tiny_path: Path) -> None:
    steps: list[StepRecord] = []
    with pressed(tiny_path) as llm:
        llm.on_step(steps.append)
        outputs = llm.generate(PROMPTS[:3], params(4))
    assert sum(one.outputs[0].metrics.num_preemptions for one in outputs) == 0  # type: ignore[union-attr]
    assert sum(one.num_prefill_tokens for one in steps) == sum(map(len, PROMPTS[:3]))
    assert sum(one.num_decode_tokens for one in steps) == 3 * 3


def test_every_request_is_reported_once_however_it_ends(tiny_path: Path) -> None:
    ended: list[FinishedRequest] = []
    with pressed(tiny_path) as llm:
        llm.on_finish(ended.append)
        core = llm.engine
        nothing_left = SamplingParams(
            temperature=0, max_tokens=4, allowed_token_ids=(5,), bad_words_token_ids=((5,),)
        )
        for name, chosen in {
            "length": params(3),
            "aborted while waiting": params(),
            "aborted while running": params(),
            "stop": SamplingParams(temperature=0, max_tokens=9, stop_token_ids=tuple(range(259))),
            "error": nothing_left,
        }.items():
            core.add_request(
                EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=chosen)
            )
        core.abort(["aborted while waiting"])
        core.step()
        core.step()
        core.abort(["aborted while running"])
        while core.has_work:
            core.step()

    by_id = {one.request_id: one for one in ended}
    assert len(by_id) == len(ended) == 5
    assert {name: one.finish_reason for name, one in by_id.items()} == {
        "length": "length",
        "aborted while waiting": "abort",
        "aborted while running": "abort",
        "stop": "stop",
        "error": "error",
    }
    assert {name: one.num_output_tokens for name, one in by_id.items()} == {
        "length": 3,
        "aborted while waiting": 0,
        "aborted while running": 2,
        "stop": 1,
        "error": 0,
    }
    for name, one in by_id.items():
        assert one.num_prompt_tokens == 3
        has_tokens = one.num_output_tokens > 0
        assert (one.first_token_time_s is not None) == has_tokens, name
        times = [one.arrival_time_s, one.first_token_time_s, one.last_token_time_s]
        known = [time for time in times if time is not None] + [one.finish_time_s]
        assert known == sorted(known)


def test_hooks_of_a_selected_plugin_observe_the_engine(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        from hotshoe.api import Component, Scheduler, hookimpl, serve

        seen = {"started": [], "steps": [], "finished": []}

        class Watcher(Scheduler):
            def schedule(self, step):
                serve(step)

        @hookimpl
        def hotshoe_component():
            return Component(
                contract="scheduler/0", factory=lambda options, context: Watcher()
            )

        @hookimpl
        def hotshoe_engine_started(components):
            seen["started"].append(components)

        @hookimpl
        def hotshoe_step_committed(record):
            seen["steps"].append(record)

        @hookimpl
        def hotshoe_request_finished(request):
            seen["finished"].append(request)
    """
    make_distribution(
        tmp_path,
        name="acme-watcher",
        modules={"acme_watcher": source},
        entry_points={"hotshoe.schedulers": {"watcher": "acme_watcher"}},
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pressed(tiny_path, scheduler="watcher") as llm:
        llm.generate(PROMPTS[:2], params(3))
        llm.use(scheduler="fcfs")
        llm.generate(PROMPTS[:2], params(3))
    import acme_watcher  # type: ignore[import-not-found]  # written above

    seen = acme_watcher.seen
    assert [one["scheduler"] for one in seen["started"]] == ["watcher (acme-watcher 1.0)"]
    assert sum(one.num_new_tokens for one in seen["steps"]) == 6
    assert [one.finish_reason for one in seen["finished"]] == ["length", "length"]

    with pressed(tiny_path) as llm:
        with pytest.raises(PluginNotFoundError):
            llm.use(scheduler="watcher", sampler="nope")
        llm.generate(PROMPTS[:2], params(3))
        assert sum(one.num_new_tokens for one in seen["steps"]) == 6
        llm.use(scheduler="watcher")
        llm.generate(PROMPTS[:2], params(3))
    assert sum(one.num_new_tokens for one in seen["steps"]) == 12
    assert len(seen["finished"]) == 4
