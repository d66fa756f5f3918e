"""The engine core in a process of its own, through its client class."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from hotshoe import LLM, RequestOutput, SamplingParams
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.errors import DrainingError, EngineDeadError, QueueFullError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SETTINGS = {"dtype": "float32", "max_model_len": 1024, "cache": {"num_blocks": 256}}

Scenario = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(scope="module")
def run(tiny_path: Path) -> Callable[..., None]:
    """Runs a scenario against an engine core of its own."""

    def run(scenario: Scenario, **settings: object) -> None:
        async def main() -> None:
            async with await AsyncLLM.start(str(tiny_path), **(SETTINGS | settings)) as llm:
                await scenario(llm)

        asyncio.run(main())

    return run


async def last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    """The finished output."""
    finished: RequestOutput | None = None
    async for output in outputs:
        finished = output
    assert finished is not None
    return finished


async def free_blocks(llm: AsyncLLM) -> int:
    """Blocks without an owner, once the core has caught up."""
    load = await llm.call("load")
    free = load["num_free_blocks"]
    assert isinstance(free, int)
    return free


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is true."""
    for _ in range(200):
        if await check():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not become true")


@pytest.mark.slow
def test_the_core_serves_many_at_once_refuses_and_frees(
    run: Callable[..., None], tiny_path: Path, llm: LLM
) -> None:
    expected = {text: llm.generate(text, GREEDY)[0].text for text in ("hello", "abc", "x y z")}

    async def scenario(remote: AsyncLLM) -> None:
        outputs = await asyncio.gather(*[last(remote.generate(text, GREEDY)) for text in expected])
        assert [one.text for one in outputs] == list(expected.values())
        assert outputs[0].outputs[0].metrics is not None

        seeded = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
        once, again = [await last(remote.generate("hello", seeded)) for _ in range(2)]
        tokens = [choice.token_ids for choice in once.outputs]
        assert tokens == [choice.token_ids for choice in again.outputs]
        assert tokens[0] != tokens[1]
        assert tokens == [one.token_ids for one in llm.generate("hello", seeded)[0].outputs]

        with pytest.raises(RequestError, match="the prompt is empty"):
            await last(remote.generate([], GREEDY))
        with pytest.raises(RequestError, match="logit_bias") as caught:
            await last(remote.generate("a", SamplingParams(logit_bias={100_000: 1.0})))
        assert caught.value.field == "logit_bias"
        with pytest.raises(RequestError, match="no call 'explode'"):
            await remote.call("explode")

        # leaving the loop early aborts the request, all choices of it
        stream = remote.generate("hello", SamplingParams(n=3, max_tokens=900, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(last(remote.generate("hello", ENDLESS)))
        await asyncio.sleep(0.1)
        task.cancel()

        async def is_idle() -> bool:
            return await free_blocks(remote) == remote.facts.num_blocks

        await eventually(is_idle)
        assert remote.num_unfinished == 0

        # what makes no sense on the socket changes nothing
        send_garbage(remote)
        assert (await last(remote.generate("hello", GREEDY))).text == expected["hello"]

        # draining: who runs may finish, who comes is refused
        running = asyncio.create_task(last(remote.generate("hello", ENDLESS)))
        while not remote.num_unfinished:
            await asyncio.sleep(0.01)
        await remote.call("drain")
        with pytest.raises(DrainingError):
            await last(remote.generate("late", GREEDY))
        assert len((await running).outputs[0].token_ids) == 900

    run(scenario)


def send_garbage(llm: AsyncLLM) -> None:
    """Messages that no client would send."""
    address = llm._to_core.getsockopt_string(zmq.LAST_ENDPOINT)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        key = llm._key
        for frames in (
            [b""],
            [b"x" * 10_000],
            [b"wrong key", b"\x91\xa5hello"],
            [key],
            [key, b""],
            [key, b"\xc1"],
            [key, os.urandom(500)],
            [key, b"\x92\xa3add\x91\x93\x01\x02\x03"],
            [key, b"\x91\xa5hello", b"more"],
        ):
            socket.send_multipart(frames)


@pytest.mark.slow
def test_a_reader_slower_than_the_engine_sees_the_last_piece(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        for delay_s in (0.0, 0.05, 0.3):
            pieces, finished = [""], False
            async for output in llm.generate("hello", GREEDY):
                text, finished = output.outputs[0].text, output.finished
                pieces.append(text[len("".join(pieces)) :])
                await asyncio.sleep(delay_s)
            assert finished
            assert "".join(pieces) == output.outputs[0].text != ""

    run(scenario)


@pytest.mark.slow
def test_a_full_queue_is_refused(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm.generate("a", ENDLESS))) for _ in range(8)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in results if isinstance(one, QueueFullError)]
        served = [one for one in results if isinstance(one, RequestOutput)]
        assert refused
        assert served
        assert len(refused) + len(served) == 8
        assert "server.max_queue is 2" in str(refused[0])

    run(scenario, max_num_seqs=1, server={"max_queue": 2})


@pytest.mark.slow
def test_everybody_hears_of_a_core_that_is_killed(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm.generate("a", ENDLESS))) for _ in range(3)]
        while llm.num_unfinished < 3:
            await asyncio.sleep(0.01)
        assert llm._handle is not None
        os.kill(llm._handle.process.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in results] == [EngineDeadError] * 3
        assert llm.death is not None
        with pytest.raises(EngineDeadError):
            await last(llm.generate("b", GREEDY))
        with pytest.raises(EngineDeadError):
            await llm.call("load")

    run(scenario)


PARENT = """
import asyncio, sys
from hotshoe.entrypoints.async_llm import AsyncLLM

async def main():
    llm = await AsyncLLM.start(sys.argv[1], max_model_len=64)
    print(llm._handle.process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_core_does_not_outlive_a_parent_that_is_killed(tiny_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    core = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{core}").exists():
            return
        time.sleep(0.02)
    os.kill(core, signal.SIGKILL)
    raise AssertionError("the core lived on")


@pytest.mark.slow
def test_a_core_that_cannot_start_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        await AsyncLLM.start(str(tmp_path / "nothing"))

    with pytest.raises(Exception, match="no such file or folder"):
        asyncio.run(main())


def test_the_plugin_sets_of_both_sides_must_agree() -> None:
    from hotshoe.config import EngineConfig
    from hotshoe.entrypoints.async_llm import check_plugins
    from hotshoe.errors import PluginError
    from hotshoe.plugins import PluginRegistry
    from hotshoe.server.messages import Plugin

    info = PluginRegistry().find("schedulers", "fcfs")
    same = Plugin("schedulers", "fcfs", info.distribution, info.version, "scheduler/0")
    check_plugins(EngineConfig(), [same])
    other = Plugin("schedulers", "fcfs", info.distribution, "0.0.1", "scheduler/0")
    with pytest.raises(PluginError, match=r"the core has hotshoe 0\.0\.1"):
        check_plugins(EngineConfig(), [other])
