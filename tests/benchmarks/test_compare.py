"""The comparison of engines: what is run, merged, left out and reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
SIZES = ["--num-prompts", "2", "--output-len", "3", "--rounds", "2", "--threads", "1"]


def run(script: str, *arguments: str | Path, code: int = 0) -> str:
    """Run a script of benchmarks/; what it printed."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``make bench-peers`` leaves it, with a tiny model and no other engine."""
    folder = tmp_path_factory.mktemp("peers")
    config = tiny_llama_config(max_position_embeddings=4096)
    model = write_tiny_checkpoint(folder / "tiny", config)
    run("peers/make_checkpoint.py", model, folder / "models" / "checkpoint")
    return folder


@pytest.fixture(scope="module")
def flags(home: Path) -> list[str]:
    return ["--home", str(home), "--model", str(home / "tiny"), *SIZES]


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture(scope="module")
def measured(home: Path, flags: list[str]) -> Path:
    """The result file of a comparison in which some engines can't take part."""
    output = home / "result.json"
    shown = run(
        *("compare.py", *flags, "--no-limits", "--output", output),
        *("--engines", "hotshoe:torch", "hotshoe:nonsense", "vllm:bf16", "hotshoe:torch+ngram"),
        *("--workloads", "prefix", "copy"),
    )
    assert "vllm:bf16 is left out: not installed" in shown
    return output


@pytest.mark.slow
def test_every_engine_that_can_runs_every_round(measured: Path) -> None:
    result = load(measured)
    assert "not installed" in result["left_out"]["vllm:bf16"]
    assert "no variant named 'nonsense'" in result["left_out"]["hotshoe:nonsense"]
    plain, drafting = (result["engines"][name] for name in ("hotshoe:torch", "hotshoe:torch+ngram"))
    assert plain["workloads"].keys() == {"prefix", "copy"}
    assert drafting["workloads"].keys() == {"copy"}
    parts = plain["workloads"]["prefix"]["parts"]
    cold, warm = (parts[part]["figures"]["num_cached_tokens"]["median"] for part in parts)
    assert cold < warm
    for figures in (part["figures"] for part in parts.values()):
        assert figures["num_output_tokens"] == {"median": 6, "min": 6, "max": 6}
        assert figures["elapsed_s"]["min"] <= figures["elapsed_s"]["median"]
    assert len(plain["workloads"]["prefix"]["rounds"]) == 2
    assert plain["memory_mb"] > 50
    assert plain["start_s"]["median"] > 0


@pytest.mark.slow
def test_a_later_run_adds_to_the_result(measured: Path, flags: list[str], tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    output.write_bytes(measured.read_bytes())
    run(
        *("compare.py", *flags, "--no-limits", "--output", output, "--merge"),
        *("--engines", "hotshoe:torch", "--workloads", "latency", "structured"),
    )
    before, after = load(measured)["engines"], load(output)["engines"]
    workloads = after["hotshoe:torch"]["workloads"]
    assert workloads.keys() == {"prefix", "copy", "latency", "structured"}
    assert workloads["prefix"] == before["hotshoe:torch"]["workloads"]["prefix"]
    assert after["hotshoe:torch+ngram"] == before["hotshoe:torch+ngram"]
    constrained = workloads["structured"]["parts"]["json x 1"]
    assert constrained["figures"]["num_output_tokens"]["median"] > 0


@pytest.mark.slow
def test_the_report_replaces_what_stands_between_the_markers(
    measured: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots are made with the extra 'bench'")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers: begin -->\nstale\n<!-- peers: end -->\nafter\n")
    run("report.py", measured, "--page", page)
    text = page.read_text()
    assert text.startswith("before\n<!-- peers: begin -->")
    assert text.endswith("<!-- peers: end -->\nafter\n")
    assert "stale" not in text
    assert "| hotshoe:torch+ngram | - | - | - | - | **" in text
    assert "Left out: vllm:bf16, not installed" in text


@pytest.mark.slow
def test_figures_stand_beside_the_least_time_that_the_machine_needs(
    home: Path, flags: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    slow = {kind: {"torch": 1e-3} for kind in ("bf16", "int8")}
    earlier = {
        "read_gb_per_s": {"torch": 1e-3},
        "matmul_gop_per_s": slow,
        "instruction_gop_per_s": {"bf16": None, "int8": None},
    }
    output.write_text(json.dumps({"limits": {"rounds": [earlier]}}))
    run(
        *("compare.py", *flags, "--output", output, "--rounds", "1", "--merge"),
        *("--engines", "hotshoe:torch", "--workloads", "latency"),
    )
    result = load(output)
    best, costs = result["limits"]["best"], result["model"]["costs"]
    assert best["int8_gop_per_s"] >= best["bf16_gop_per_s"] > 0
    limit = result["engines"]["hotshoe:torch"]["workloads"]["latency"]["parts"][""]["limit"]
    num_params = costs["layer_params"] + costs["head_params"]
    read_ms = 1e3 * 2 * num_params / (1e9 * best["read_gb_per_s"])
    multiply_ms = 1e3 * 2 * 2 * num_params / (1e9 * best["bf16_gop_per_s"])
    # two requests; their keys and values, and attention to them, come on top
    assert max(read_ms, multiply_ms) < limit["tpot_ms"] < 2 * max(read_ms, multiply_ms)
    assert limit["elapsed_s"] == pytest.approx(1e-3 * (limit["ttft_ms"] + 2 * limit["tpot_ms"]))
    # an op takes the longer of reading and multiplying, so together at most twice the longer
    separate_s = 6 / limit["separate_tokens_per_s"]
    assert 6 / limit["output_tokens_per_s"] <= separate_s < 2 * limit["elapsed_s"]
    (only,) = result["engines"]["hotshoe:torch"]["workloads"]["latency"]["rounds"]
    assert only["limit"] == {"": limit}, "not that of the time when it was measured"


def test_an_engine_that_nobody_knows_is_refused(flags: list[str]) -> None:
    shown = run("compare.py", *flags, "--engines", "sglang:bf16", code=2)
    assert "got 'sglang:bf16', allowed: ENGINE:VARIANT" in shown
    assert "hotshoe, vllm, openvino, llama_cpp, transformers" in shown


def test_a_home_without_models_says_how_to_make_them(tmp_path: Path) -> None:
    shown = run("compare.py", "--home", tmp_path, code=2)
    assert "make it with: make bench-peers" in shown
