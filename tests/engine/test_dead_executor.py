"""An executor that dies: one clear error, and no second life."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.errors import EngineDeadError
from hotshoe.testing.plugins import make_distribution

SOURCE = """
    from concurrent.futures import Future

    from hotshoe.api import Component, EngineDeadError, Executor, PluginOptions, hookimpl

    class Options(PluginOptions):
        how: str

    class Mortal(Executor):
        def __init__(self, options, context):
            self._how = options.how
            self._worker = context.create_worker(0)

        def submit(self, plan):
            future = Future()
            if plan.step_id < 3:
                future.set_result(self._worker.execute(plan))
            elif self._how == "submit":
                raise OSError("no more")
            else:
                future.set_exception(EngineDeadError("the worker is gone"))
            return future

        def call(self, method, *args):
            future = Future()
            future.set_result(self._worker.call(method, *args))
            return future

        def close(self):
            self._worker.close()

    @hookimpl
    def hotshoe_component():
        return Component(contract="executor/0", factory=Mortal, options=Options)
"""

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("how", "message"),
    [("submit", "executor Mortal didn't take step 3.*no more"), ("result", "the worker is gone")],
)
def test_a_dead_executor_ends_the_engine_for_good(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    site = make_distribution(
        tmp_path,
        name="acme-mortal",
        modules={"acme_mortal": SOURCE},
        entry_points={"hotshoe.executors": {"mortal": "acme_mortal"}},
    )
    monkeypatch.syspath_prepend(site)
    executor = {"name": "mortal", "options": {"how": how}}
    with LLM(str(tiny_path), max_model_len=64, executor=executor) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=message):
                llm.generate("abc", PARAMS)
        assert llm.engine.death is not None
        with pytest.raises(EngineDeadError, match=message):
            llm.engine.step()
