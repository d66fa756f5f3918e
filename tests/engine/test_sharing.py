"""Several streams, calls and threads on one LLM at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import StepRecord
from hotshoe.entrypoints.outputs import RequestOutput
from hotshoe.entrypoints.turns import Turns
from hotshoe.errors import HotshoeError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """Whatever a test does, the pool is whole afterwards and nobody is alive."""
    yield
    assert not llm.engine.requests
    assert llm.engine.kv_cache.num_free_blocks == llm.engine.kv_cache.num_blocks


def pieces(stream: Iterator[RequestOutput]) -> str:
    return "".join(output.outputs[0].new_text for output in stream)


def test_a_stream_goes_on_after_another_call_has_moved_its_request_on(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].text
    stream = llm.stream("hello", GREEDY)
    first = next(stream).outputs[0].new_text
    llm.generate("a longer call", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert first + pieces(stream) == expected


def test_a_stop_string_that_came_during_another_call_ends_the_stream_there(llm: LLM) -> None:
    full = llm.generate("hello", GREEDY)[0].text
    stop = full[5:7]
    expected = llm.generate("hello", SamplingParams(temperature=0, max_tokens=12, stop=(stop,)))
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=12, stop=(stop,)))
    outputs = [next(stream)]
    llm.generate("a longer call", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    outputs += stream
    choice = outputs[-1].outputs[0]
    assert (choice.text, choice.stop_reason) == (expected[0].text, stop)
    assert choice.token_ids == expected[0].outputs[0].token_ids


def test_streams_take_turns(llm: LLM) -> None:
    prompts = ["one", "two, which is longer", "three"]
    expected = [output.text for output in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", "", ""]
    # a stream that others have moved on has several tokens at once, so some end sooner
    for together in zip_longest(*streams):
        for index, output in enumerate(together):
            texts[index] += output.outputs[0].new_text if output else ""
    assert texts == expected


def test_threads_share_an_llm(llm: LLM) -> None:
    prompts = [f"prompt number {index}" for index in range(8)]
    expected = [output.text for output in llm.generate(prompts, GREEDY)]
    found: dict[int, list[str]] = {index: [] for index in range(8)}

    def work(index: int) -> None:
        for turn in range(4):
            if turn % 2:
                found[index].append(pieces(llm.stream(prompts[index], GREEDY)))
            else:
                found[index].append(llm.generate(prompts[index], GREEDY)[0].text)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [expected[index]] * 4 for index in range(8)}


def test_a_stream_that_is_collected_in_the_middle_of_a_step_frees_its_blocks(llm: LLM) -> None:
    streams = [llm.stream("hello", GREEDY)]
    next(streams[0])

    def collect(record: StepRecord) -> None:
        streams.clear()
        gc.collect()

    llm.on_step(collect)
    llm.generate("another", GREEDY)
    llm.engine.step_observers.remove(collect)
    assert not streams
    assert not llm.engine.requests


def test_an_observer_that_generates_is_refused_and_the_step_goes_on(llm: LLM) -> None:
    caught: list[HotshoeError] = []

    def generate(record: StepRecord) -> None:
        try:
            llm.generate("from inside", GREEDY)
        except HotshoeError as error:
            caught.append(error)

    llm.on_step(generate)
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 12
    llm.engine.step_observers.remove(generate)
    assert "used from inside a step of its own" in str(caught[0])


def test_a_call_whose_updates_somebody_else_took_says_so(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(HotshoeError, match=r"taken by another caller of engine\.step\(\)"):
        next(stream)


def test_closing_ends_open_streams_and_refuses_everything_after(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), dtype="float32", max_model_len=64)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.close()
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    for call in (
        lambda: llm.generate("hello", GREEDY),
        lambda: llm.use(scheduler="priority"),
        llm.reset_prefix_cache,
    ):
        with pytest.raises(HotshoeError, match="this LLM is closed; build a new one"):
            call()


def test_what_is_left_behind_during_a_turn_is_cleaned_up_at_its_end() -> None:
    cleaned: list[list[str]] = []
    turns = Turns(cleaned.append)
    with turns.take():
        turns.leave_behind(["a", "b"])
        assert not cleaned
    assert cleaned == [["a", "b"]]
    turns.leave_behind(["c"])
    assert cleaned == [["a", "b"], ["c"]]
