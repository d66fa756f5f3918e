"""``hotshoe kernels build``: every plugin that has something to prepare does so, apart from this
process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hotshoe.entrypoints.cli.main import main
from hotshoe.plugins import PluginInfo, prepare_in_subprocess
from hotshoe.testing.plugins import make_distribution

KERNELS = """
    import sys
    from typing import Literal

    from hotshoe.api import Component, PluginOptions, hookimpl

    class Options(PluginOptions):
        isa: Literal["auto", "wide"] = "auto"

    def prepare(options):
        print("preparing", options.isa, file=sys.stderr)
        {body}

    @hookimpl
    def hotshoe_component():
        return Component(
            contract="kernels/0",
            factory=lambda options, context: None,
            options=Options,
            prepare=prepare,
            unsupported={unsupported},
        )
"""


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str = "return []") -> PluginInfo:
    """Install kernels that prepare themselves so."""
    install_all(tmp_path, monkeypatch, {"acme": KERNELS.format(body=body, unsupported=())})
    return PluginInfo("kernels", "acme", "acme", "1.0", "prepared_acme")


def install_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: Mapping[str, str]
) -> None:
    """Install kernels by name."""
    make_distribution(
        tmp_path,
        modules={f"prepared_{name}": source for name, source in sources.items()},
        entry_points={"hotshoe.kernels": {name: f"prepared_{name}" for name in sources}},
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_every_plugin_that_has_something_to_prepare_does_so_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sources = {
        "good": KERNELS.format(body="return []", unsupported=()),
        "poor": KERNELS.format(body="return ['no iron; buy one']", unsupported=()),
        "alien": KERNELS.format(body="return []", unsupported=("no such device",)),
        "broken": "1 / 0",
    }
    install_all(tmp_path, monkeypatch, sources)
    assert main(["kernels", "build"]) == 1
    printed = capfd.readouterr()
    results = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert results["kernels/good"].startswith("ready (")
    assert results["kernels/poor"].startswith("failed: no iron; buy one (")
    assert results["kernels/alien"] == "skipped: no such device"
    assert results["kernels/broken"] == "skipped: ZeroDivisionError: division by zero"
    assert results["kernels/cpu"].startswith("ready (")
    assert "schedulers/fcfs" not in results
    assert printed.err.count("preparing auto") == 2
    assert "prepared_good" not in sys.modules


def test_options_reach_the_plugin_and_wrong_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    info = install(tmp_path, monkeypatch)
    assert prepare_in_subprocess(info, {"isa": "wide"}) == []
    assert "preparing wide" in capfd.readouterr().err
    (reason,) = prepare_in_subprocess(info, {"isa": "narrow"})
    assert "options.isa: got 'narrow', allowed: " in reason


def test_plugin_that_ends_its_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = install(tmp_path, monkeypatch, body="import os; os.kill(os.getpid(), 9)")
    assert prepare_in_subprocess(info, {}) == [
        f"{info.label} crashed while being prepared, signal SIGKILL"
    ]


def test_unknown_action_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "brew"]) == 2
    assert "expected build, got 'brew'" in capsys.readouterr().err
    assert main(["kernels", "--help"]) == 0
    assert "usage: hotshoe kernels build" in capsys.readouterr().out
