"""The measurement of a GPU, as far as a machine without one can run it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a dry run printed, and its result."""
    output = tmp_path_factory.mktemp("gpu") / "results"
    done = subprocess.run(
        [BENCHMARKS / "gpu" / "run.sh", "--dry-run", "--output", output],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((output / "gpu.json").read_text())
    return done.stdout, result


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the measurement's modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    yield importlib.import_module
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


@pytest.mark.slow
def test_dry_run_runs_every_part_and_judges_nothing(dry_run: tuple[str, dict[str, Any]]) -> None:
    shown, result = dry_run
    assert {name: part["status"] for name, part in result["parts"].items()} == dict.fromkeys(
        (
            *("limits", "attention", "decode tiny", "comparison"),
            *("tests", "linears", "draws", "switches"),
        ),
        "done",
    )
    assert result["is_dry_run"] is True
    assert result["versions"]["hotshoe"]
    assert {one["verdict"] for one in result["bars"]} == {"not measured"}
    assert len(result["bars"]) == 9
    assert "0 passed, 0 failed, 9 not measured" in shown.splitlines()[-1]


@pytest.mark.slow
def test_dry_run_measures_times_but_no_shares(dry_run: tuple[str, dict[str, Any]]) -> None:
    parts = dry_run[1]["parts"]
    figures = [
        (key, value)
        for part in parts.values()
        for name, entries in part["figures"].items()
        if name != "environment"
        for key, value in entries.items()
    ]
    shares = [value for key, value in figures if "share" in key or key in ("ratio", "num_passed")]
    assert set(shares) == {None}
    assert all(value > 0 for key, value in figures if key in ("step_ms", "us", "ms"))
    assert set(parts["switches"]["figures"]) == {
        f"{variant}, batch {batch}"
        for variant in ("as it is", "no graphs", "no overlap", "neither")
        for batch in (1, 4)
    }


PARTS = """
import subprocess

class Job:
    def __init__(self, *, tell, **facts):
        self.tell = tell

def good(job):
    job.tell("figure", {"value": 1})

def broken(job, what):
    job.tell("figure", {"value": 2})
    raise KeyError(what)

def late(job):
    subprocess.run(["sleep", "600"])
"""

SCRIPT = """
import json, measure, pathlib, sizes

if __name__ == "__main__":
    measure.TIMEOUTS_S.update(good=300, broken=300, late=0.1)
    folder = pathlib.Path(__file__).parent
    (folder / "over").mkdir()
    runner = measure.Runner(sizes.DRY, folder, 900)
    runner.run(measure.Part("broken", "broken", ("it",)))
    runner.run(measure.Part("late", "late"))
    runner.run(measure.Part("good", "good"))
    over = measure.Runner(sizes.DRY, folder / "over", 0)
    over.run(measure.Part("starved", "good"))
    print(json.dumps(runner.results | over.results))
"""


def test_part_that_fails_or_takes_too_long_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "script.py").write_text(SCRIPT)
    roots = [str(tmp_path), str(BENCHMARKS / "gpu"), str(BENCHMARKS)]
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(roots)},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert {name: one["status"].partition(",")[0] for name, one in results.items()} == {
        "broken": "failed",
        "late": "stopped after 0 s",
        "good": "done",
        "starved": "not run: no time left",
    }
    assert results["good"]["figures"] == {"figure": {"value": 1}}
    # what it had told before is kept
    assert results["broken"]["figures"] == {"figure": {"value": 2}}
    assert "KeyError: 'it'" in (tmp_path / "gpu.log").read_text()


def test_a_bar_is_passed_failed_or_not_measured(module: Any) -> None:
    bars = module("bars")
    least = bars.Bar("part", "figure", "share", "a share", 0.7)
    most = bars.Bar("part", "figure", "idle", "a pause", 0.05, is_most=True)

    def verdicts(**figures: float | None) -> list[str]:
        parts = {"part": {"figure": figures}}
        return [bar.judge(parts)["verdict"] for bar in (least, most)]

    assert verdicts(share=0.7, idle=0.05) == ["passed", "passed"]
    assert verdicts(share=0.69, idle=0.06) == ["failed", "failed"]
    assert verdicts(share=None) == ["not measured", "not measured"]
    assert least.judge({})["verdict"] == "not measured"


def test_shares_are_of_what_the_limits_allow(module: Any) -> None:
    parts = module("parts")

    def job(**limits: float | None) -> Any:
        return parts.Job(sizes=None, tell=print, **limits)

    measured = job(bandwidth=4e12, matrix_rate=8e14)
    assert measured.bandwidth_share(3.2e9, 1e-3) == pytest.approx(0.8)
    assert measured.matrix_share(4e11, 1e-3) == pytest.approx(0.5)
    unknown = job(bandwidth=None, matrix_rate=None)
    assert unknown.bandwidth_share(1, 1) is unknown.matrix_share(1, 1) is None


@pytest.mark.parametrize(
    ("intervals", "longer_than", "expected"),
    [
        ([], 0.0, None),
        ([(0, 10)], 0.0, 0.0),
        ([(0, 10), (20, 40)], 0.0, 0.25),
        ([(20, 40), (0, 10)], 0.0, 0.25),
        ([(0, 30), (5, 10), (28, 40)], 0.0, 0.0),
        ([(0, 10), (12, 20), (30, 40)], 5.0, 0.25),
        ([(0, 10), (12, 20), (30, 40)], 1.0, 0.3),
    ],
)
def test_idle_share_counts_pauses_that_are_long_enough(
    module: Any, intervals: list[tuple[float, float]], longer_than: float, expected: float | None
) -> None:
    found = module("timing").idle_share(intervals, longer_than)
    assert found == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("3 passed, 1 skipped, 40 deselected in 2.1s", (3, 0, 1)),
        ("== 1 failed, 3 passed, 2 errors in 2.1s ==", (3, 3, 0)),
        ("no tests ran in 0.01s", (0, 0, 0)),
        ("Segmentation fault", (0, 1, 0)),
    ],
)
def test_counts_of_tests_are_read(module: Any, line: str, expected: tuple[int, int, int]) -> None:
    counts = module("parts").counts_of(f"tests/gpu: ..\n{line}\n")
    assert tuple(counts.values()) == expected


def test_a_source_tree_looks_installed(module: Any, tmp_path: Path) -> None:
    prepare = module("prepare")
    prepare.write_metadata(tmp_path)
    (info,) = tmp_path.glob("*.dist-info")
    found = Distribution.at(info)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert found.metadata["Name"] == "hotshoe"
    assert {(one.group, one.name, one.value) for one in found.entry_points} == {
        (group, name, value)
        for group, entries in project["entry-points"].items()
        for name, value in entries.items()
    }
    assert REPOSITORY / "framework" in prepare.source_roots()
    assert all(root.is_dir() for root in prepare.source_roots())
