"""A third party's executor: one worker in a thread of its own, with several steps in flight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hotshoe.testing.plugins import make_distribution

THREADED = """
    from concurrent.futures import ThreadPoolExecutor

    from pydantic import Field

    from hotshoe.api import Component, Executor, PluginOptions, hookimpl

    class Options(PluginOptions):
        max_in_flight: int = Field(default=2, description="plans submitted at a time")

    class Threaded(Executor):
        def __init__(self, options, context):
            self.max_in_flight = options.max_in_flight
            self._thread = ThreadPoolExecutor(1)
            self._compiler = ThreadPoolExecutor(1)
            self._worker = self._thread.submit(context.create_worker, 0).result()

        def submit(self, plan):
            return self._thread.submit(self._worker.execute, plan)

        def call(self, method, *args):
            thread = self._compiler if method == "compile_grammar" else self._thread
            return thread.submit(self._worker.call, method, *args)

        def close(self):
            self._thread.shutdown()
            self._compiler.shutdown()
            self._worker.close()

    @hookimpl
    def hotshoe_component():
        return Component(contract="executor/0", factory=Threaded, options=Options)
"""


@pytest.fixture(scope="session")
def threaded_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Name of the executor, which is installed as long as the tests run."""
    site = make_distribution(
        tmp_path_factory.mktemp("site"),
        name="acme-executors",
        modules={"acme_executors": THREADED},
        entry_points={"hotshoe.executors": {"acme_threaded": "acme_executors"}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield "acme_threaded"
