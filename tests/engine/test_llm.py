"""The offline API, as a script or a notebook uses it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotshoe import LLM, SamplingParams
from hotshoe.api import FinishedRequest, Scheduler, StepPlanner, StepRecord, serve
from hotshoe.errors import ConfigError, HotshoeError, PluginNotFoundError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def blocks_come_back(llm: LLM) -> Iterator[None]:
    """Whatever a test does, the pool is whole afterwards."""
    yield
    assert llm.engine.kv_cache.num_free_blocks == llm.engine.kv_cache.num_blocks


def test_one_prompt_or_many_as_text_or_token_ids_give_the_same_tokens(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    alone = llm.generate("hello", GREEDY)
    many = llm.generate(["hello", ids, tuple(ids)], GREEDY)
    assert [one.outputs[0].token_ids for one in many] == [alone[0].outputs[0].token_ids] * 3
    assert len(alone[0].outputs[0].token_ids) == 12
    assert many[0].prompt == "hello"
    assert many[1].prompt is None
    assert llm.generate(ids, GREEDY)[0].text == alone[0].text


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["a", "b"], [short, GREEDY])
    assert [len(one.outputs[0].token_ids) for one in outputs] == [2, 12]
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [short])


def test_chat_renders_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    alone = llm.chat(conversation, GREEDY)
    many = llm.chat([conversation, conversation], GREEDY)
    assert [one.text for one in many] == [alone[0].text] * 2
    assert alone[0].prompt_token_ids == llm.render_chat(conversation)


def test_choices_are_distinct_and_come_again_with_the_same_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    first, second = llm.generate("x", params)[0], llm.generate("x", params)[0]
    tokens = [choice.token_ids for choice in first.outputs]
    assert len({tuple(one) for one in tokens}) == 3
    assert [choice.token_ids for choice in second.outputs] == tokens
    assert [choice.index for choice in first.outputs] == [0, 1, 2]


def test_a_request_without_a_seed_reports_one_that_reproduces_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    choice = llm.generate("x", params)[0].outputs[0]
    again = llm.generate(
        "x", SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=choice.seed)
    )
    assert again[0].outputs[0].token_ids == choice.token_ids
    assert llm.generate("x", params)[0].outputs[0].seed != choice.seed


def test_streamed_pieces_make_up_the_text(llm: LLM) -> None:
    pieces = []
    for output in llm.stream("hello", GREEDY):
        pieces.append(output.outputs[0].new_text)
    assert len(pieces) == 12
    assert "".join(pieces) == llm.generate("hello", GREEDY)[0].text


def test_closing_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    assert llm.engine.kv_cache.num_free_blocks < llm.engine.kv_cache.num_blocks
    stream.close()
    assert not llm.engine.requests


def test_metrics_tell_the_times_of_a_request(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = list(range(1, 41))
    metrics = llm.generate([prompt], GREEDY)[0].outputs[0].metrics
    assert metrics is not None
    assert metrics.queue_time_s is not None
    assert metrics.time_to_first_token_s is not None
    assert metrics.prefill_time_s is not None
    assert 0 <= metrics.queue_time_s <= metrics.time_to_first_token_s
    assert len(metrics.inter_token_times_s) == 11
    assert metrics.num_cached_tokens == 0
    again = llm.generate([prompt], GREEDY)[0]
    assert again.num_cached_tokens == 32


def test_a_request_that_ends_by_a_stop_string_has_metrics_too(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY)[0].text
    stop = text[4:6]
    output = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=12, stop=stop, ignore_eos=True)
    )[0]
    choice = output.outputs[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    assert choice.text == text[: text.index(stop)]
    assert choice.metrics is not None


def test_a_prompt_that_cannot_be_served_stops_the_call_before_anything_runs(llm: LLM) -> None:
    records: list[StepRecord] = []
    llm.on_step(records.append)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(["fine", []], GREEDY)
    llm.engine.step_observers.remove(records.append)
    assert records == []
    assert len(llm.generate("fine", GREEDY)) == 1


@pytest.mark.parametrize("prompt", [[1.5], [True], ["a", 3]])
def test_a_prompt_of_another_kind_is_refused(llm: LLM, prompt: list[object]) -> None:
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids"):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]  # the point of the test


@pytest.mark.parametrize("prompts", [None, 5, b"hello", {"prompt": "hello"}, {"a", "b"}])
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match="prompts: expected a text, a list of token ids, or"):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_arrays_and_tensors_of_token_ids_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    expected = llm.generate(ids, GREEDY)[0].text
    for prompts in (np.array(ids), torch.tensor([ids]), [np.array(ids)], [list(np.array(ids))]):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.text for output in outputs] == [expected]
        assert all(type(one) is int for one in outputs[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": "high"}, "priority: got 'high', allowed: a whole number"),
        ({"priority": [1.5]}, "priority: got 1.5, allowed: a whole number"),
        ({"cache_salt": 5}, "cache_salt: got 5, allowed: a text or None"),
        ({"metadata": 5}, "metadata: got 5, allowed: a mapping"),
        ({"on_error": "ignore"}, "on_error: got 'ignore', allowed: 'raise' or 'return'"),
        ({"sampling_params": []}, "sampling_params has 0 entries for 1 prompts"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.generate("hello", **arguments)
    assert not llm.engine.requests


def test_use_swaps_all_or_nothing(llm: LLM) -> None:
    before = llm.components
    with pytest.raises(PluginNotFoundError, match="no sampler plugin named 'nope'"):
        llm.use(scheduler="priority", sampler="nope")
    with pytest.raises(ConfigError, match="expected a name, or name and options"):
        llm.use(scheduler={"name": "priority", "options": 5})
    assert llm.components == before


def test_generating_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def main() -> str:
        return llm.generate("hello", GREEDY)[0].text

    assert asyncio.run(main()) == llm.generate("hello", GREEDY)[0].text


def test_generating_works_outside_of_the_main_thread(llm: LLM) -> None:
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(llm.generate("hello", GREEDY)[0].text))
    thread.start()
    thread.join()
    assert texts == [llm.generate("hello", GREEDY)[0].text]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Processes in the background, and those that share tests among them, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_the_call_after_its_step_and_leaves_the_engine_usable(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].text
    sent: list[StepRecord] = []

    def interrupt(record: StepRecord) -> None:
        if not sent:
            sent.append(record)
            os.kill(os.getpid(), signal.SIGINT)

    llm.on_step(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", GREEDY)
    llm.engine.step_observers.remove(interrupt)
    assert not llm.engine.requests
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("hello", GREEDY)[0].text == expected


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_pressed_twice_breaks_into_a_step(llm: LLM) -> None:
    outlived: list[StepRecord] = []

    def interrupt(record: StepRecord) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        outlived.append(record)

    llm.on_step(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", GREEDY)
    llm.engine.step_observers.remove(interrupt)
    assert not outlived
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_between_two_steps_of_a_stream_reaches_its_reader_at_once(llm: LLM) -> None:
    received = []

    def read() -> None:
        for output in llm.stream("hello", GREEDY):
            os.kill(os.getpid(), signal.SIGINT)
            received.append(output)

    with pytest.raises(KeyboardInterrupt):
        read()
    assert not received


class LastInFirstOut(Scheduler):
    """A policy of one line."""

    def __init__(self) -> None:
        self.num_calls = 0

    def schedule(self, step: StepPlanner) -> None:
        self.num_calls += 1
        serve(step, order=lambda request: -request.arrival_index)


def test_use_swaps_the_scheduler_by_instance_and_by_name(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].text
    policy = LastInFirstOut()
    llm.use(scheduler=policy)
    assert llm.generate("hello", GREEDY)[0].text == expected
    assert policy.num_calls >= 12
    assert llm.components["scheduler"].startswith("LastInFirstOut")
    llm.use(scheduler="priority")
    assert llm.components["scheduler"].startswith("priority (hotshoe")
    llm.use(scheduler={"name": "fcfs", "options": {}}, sampler="standard")
    assert llm.generate("hello", GREEDY)[0].text == expected


def test_use_refuses_what_it_cannot_swap_and_keeps_the_old_one(llm: LLM) -> None:
    before = llm.engine.scheduler
    with pytest.raises(ConfigError, match="can swap scheduler and sampler, not attention"):
        llm.use(attention="torch_sdpa")
    with pytest.raises(PluginNotFoundError, match="did you mean 'fcfs'"):
        llm.use(scheduler="fcfz")
    with pytest.raises(ConfigError, match=r"scheduler\.options\.speed"):
        llm.use(scheduler={"name": "fcfs", "options": {"speed": 3}})
    assert llm.engine.scheduler is before


def test_observers_see_finished_and_aborted_requests(llm: LLM) -> None:
    seen: list[FinishedRequest] = []
    llm.on_finish(seen.append)
    llm.generate("hello", GREEDY)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()
    llm.engine.finish_observers.remove(seen.append)
    assert [one.finish_reason for one in seen] == ["length", "abort"]
    assert seen[0].num_output_tokens == 12


def test_the_loop_can_be_driven_by_hand(llm: LLM) -> None:
    from hotshoe.engine.request import EngineRequest

    request = EngineRequest(request_id="mine", prompt_token_ids=[1, 2, 3], sampling_params=GREEDY)
    llm.engine.add_request(request)
    tokens: list[int] = []
    while llm.engine.requests:
        for update in llm.engine.step():
            tokens += update.new_token_ids
    assert tokens == llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids


def test_components_are_given_by_name_by_section_or_as_objects(tiny_path: Path) -> None:
    policy = LastInFirstOut()
    with LLM(
        str(tiny_path),
        max_model_len=64,
        scheduler=policy,
        attention="torch_sdpa",
        spec_decode={"name": "ngram", "options": {"num_draft_tokens": 2}},
    ) as llm:
        assert llm.generate("abab", GREEDY)[0].outputs[0].finish_reason == "length"
        assert policy.num_calls > 0
        assert llm.components["spec_decode"].startswith("ngram")
    with pytest.raises(HotshoeError, match="closed"):
        llm.generate("again", GREEDY)
    llm.close()


def test_an_object_of_the_wrong_kind_is_refused(tiny_path: Path) -> None:
    with pytest.raises(HotshoeError, match="schedule"):
        LLM(str(tiny_path), scheduler=object())
    with pytest.raises(ConfigError, match="schedulr"):
        LLM(str(tiny_path), schedulr="fcfs")


def test_settings_come_from_a_file_and_arguments_win(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        f"model: {{path: {tiny_path}, max_model_len: 64}}\nscheduler: {{name: priority}}\n"
    )
    with LLM(config=str(file), max_model_len=32) as llm:
        assert llm.components["scheduler"].startswith("priority")
        with pytest.raises(RequestError, match="max_model_len is 32"):
            llm.generate([list(range(40))], GREEDY)


def test_the_model_generation_config_gives_sampling_defaults(
    tiny_path: Path, tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.25, "top_k": 7}'
    )
    with LLM(str(folder), max_model_len=64) as llm:
        params = llm.default_sampling_params(max_tokens=3)
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 3)
    settings = {"path": str(folder), "use_generation_config": False, "max_model_len": 64}
    with LLM(settings) as llm:
        assert llm.default_sampling_params().temperature == 1.0


PDB_SCRIPT = """
import sys
from hotshoe import LLM, SamplingParams
from hotshoe.api import Scheduler, serve
class Stops(Scheduler):
    def schedule(self, step):
        breakpoint()
        serve(step)
with LLM(sys.argv[1], max_model_len=64, scheduler=Stops()) as llm:
    print("text", llm.generate("a", SamplingParams(max_tokens=1))[0].outputs[0].finish_reason)
"""


@pytest.mark.slow
def test_a_breakpoint_in_a_scheduler_stops_in_its_frame(tiny_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PDB_SCRIPT, str(tiny_path)],
        input="p 'views', len(step.waiting)\nc\nc\nc\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "('views', 1)" in result.stdout
    assert "text length" in result.stdout
