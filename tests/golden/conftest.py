"""Oracles, made once a run, and a report of what was compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from golden.comparison import Tally
from golden.oracle import Oracle
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe.testing.plugins import make_distribution

OVERLAPPED = """
    from hotshoe.api import Component, PluginOptions, hookimpl
    from hotshoe_executors.uniproc import UniprocExecutor

    @hookimpl
    def hotshoe_component():
        return Component(
            contract="executor/0",
            factory=lambda options, context: UniprocExecutor(context, 3),
            options=PluginOptions,
        )
"""

TALLY = "golden comparison"  # a property of a test


@pytest.fixture(scope="session")
def embedded_oracle() -> Oracle:
    """The embedded model in transformers."""
    return Oracle.embedded()


@pytest.fixture
def all_cores() -> Iterator[None]:
    """As many threads as the environment grants. Only for long runs on a machine of one's own: on a
    busy one, threads that wait for each other are slower than one.
    """
    num_cores = len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(min(num_cores, int(os.environ.get("OMP_NUM_THREADS", num_cores))))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_oracle(tiny_folder: Path) -> Oracle:
    """The tiny Llama in transformers."""
    return Oracle.folder(tiny_folder)


@pytest.fixture(scope="session")
def overlapped_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An executor named ``overlapped`` that lets three steps be in flight."""
    site = make_distribution(
        tmp_path_factory.mktemp("site"),
        modules={"overlapped_executor": OVERLAPPED},
        entry_points={"hotshoe.executors": {"overlapped": "overlapped_executor"}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts what the test compares; reported at the end of the run."""
    found = Tally(request.node.name)
    yield found
    request.node.user_properties.append((TALLY, str(found)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the comparisons with their excuses."""
    reports = [one for some in terminalreporter.stats.values() for one in some]
    tallies = [
        value
        for report in reports
        if getattr(report, "when", None) == "teardown"  # the last that a test has
        for name, value in report.user_properties
        if name == TALLY
    ]
    if tallies:
        terminalreporter.section("golden comparisons")
        for tally in tallies:
            terminalreporter.line(tally)
