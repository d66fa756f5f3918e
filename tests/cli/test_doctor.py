"""The doctor: what it finds on this machine, and what it says about one that lacks something."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.command import COMMAND, ENVIRONMENT
from hotshoe import __version__
from hotshoe.entrypoints.cli.main import main
from hotshoe.testing.plugins import make_distribution

SCHEDULER = """
    from hotshoe.api import Component, hookimpl
    from hotshoe_schedulers import fcfs

    def prepare(options):
        assert "pending" not in FACTS, "the doctor only asks"
        return [FACTS["problem"]] if "problem" in FACTS else []

    @hookimpl
    def hotshoe_component():
        theirs = fcfs.hotshoe_component()
        return Component(
            contract=theirs.contract,
            factory=theirs.factory,
            prepare=prepare,
            diagnose=lambda options: FACTS,
        )
"""


PLAIN = ["--kernels", "torch", "--attention", "torch_sdpa", "--sampler", "standard"]


def doctor(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run it as a process with other environment variables."""
    done = subprocess.run(
        [COMMAND, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, **variables},
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def diagnose(
    facts: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_flags: list[str],
) -> tuple[int, dict[str, Any]]:
    """What the doctor makes of a scheduler that tells such facts about itself."""
    module = f"told_{tmp_path.name}"
    make_distribution(
        tmp_path,
        modules={module: f"    FACTS = {facts!r}\n{SCHEDULER}"},
        entry_points={"hotshoe.schedulers": {"told": module}},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code = main(["doctor", "--json", "--scheduler", "told", *PLAIN, *model_flags])
    return code, json.loads(capsys.readouterr().out)


def test_report_says_what_the_machine_has_and_what_is_chosen_here(
    capsys: pytest.CaptureFixture[str], model_flags: list[str]
) -> None:
    assert main(["doctor", *PLAIN, *model_flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"  hotshoe                 {__version__}"
    facts = dict(line.strip().split("  ", 1) for line in lines[: lines.index("")])
    assert facts["torch"].strip().startswith(torch.__version__)
    assert f"{len(os.sched_getaffinity(0))} usable cores" in facts["cpu"]
    words = [" ".join(line.split()) for line in lines]
    assert "kernels torch (kernels.name is torch (cli --kernels))" in words
    assert "attention torch_sdpa (attention.name is torch_sdpa (cli --attention))" in words
    assert "no problems found" in lines


def test_problem_of_a_plugin_is_reported_once_and_makes_the_exit_code_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_flags: list[str],
) -> None:
    facts = {"iron": "none", "problem": "no soldering iron; buy one"}
    code, report = diagnose(facts, tmp_path, monkeypatch, capsys, model_flags)
    assert code == 1
    assert report["plugins"] == {"schedulers/told": facts}
    assert report["problems"] == ["no soldering iron; buy one"]


def test_pending_work_is_a_note_and_nothing_is_done_about_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_flags: list[str],
) -> None:
    facts = {"pending": "the iron is cold"}
    code, report = diagnose(facts, tmp_path, monkeypatch, capsys, model_flags)
    assert code == 0
    note = "the iron is cold; the first engine does it, or now: hotshoe kernels build"
    assert note in report["notes"]
    assert [one["plugin"] for one in report["components"] if one["section"] == "scheduler"] == [
        "told"
    ]


def test_machine_without_a_compiler_is_told_what_to_install(
    tmp_path: Path, model_flags: list[str]
) -> None:
    path = str(tmp_path)
    code, text = doctor(*model_flags, PATH=path, XDG_CACHE_HOME=path, TMPDIR=path, CXX="")
    assert code == 1
    assert "  compiler          none\n" in text
    assert "kernels: cpu refused: no C++ compiler found; install g++" in text
    assert "problem: no C++ compiler found; install g++ (Debian, Ubuntu: apt install g++)" in text
    assert re.search(r"^  kernels +torch \(kernels\.name is auto \(default\)\)", text, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_what_would_stop_an_engine_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *PLAIN, "--model", "/no/such/model"]) == 1
    assert "problem: model '/no/such/model'" in capsys.readouterr().out
