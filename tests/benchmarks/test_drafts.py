"""The scripts that measure and compare drafts, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotshoe.testing.models import write_tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
SIZES = ["--per-category", "1", "--max-tokens", "12", "--max-prompt-tokens", "600"]


def run(script: str, *arguments: str | Path, code: int = 0) -> str:
    """Run a script of benchmarks/; what it printed."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def settings(model: Path) -> str:
    return json.dumps({"model": str(model), "kernels": "torch", "attention": "torch_sdpa"})


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records: list[dict[str, Any]] = [
        {"category": "qa", "turns": ["Why is grass green?"]},
        {"category": "writing", "turns": ["aa bb aa bb aa", "Again."]},
    ]
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.slow
def test_outputs_with_drafts_are_compared_in_every_way(
    settings: str, model: Path, questions: Path, tmp_path: Path
) -> None:
    output = tmp_path / "equality.json"
    printed = run(
        "drafts_equality.py",
        *("--draft-model", model, "--settings", settings, "--questions", questions),
        *("--output", output, *SIZES),
    )
    ways = json.loads(output.read_text())["draft_model"]
    assert {"batch 1", "stop strings", "constraints", "preemption"} <= ways.keys()
    assert all(way["num_tokens"] > 0 and not way["errors"] for way in ways.values())
    assert ways["batch 32"]["num_accepted"] > 0
    assert ways["preemption"]["num_preemptions"] > 0
    assert printed.splitlines()[-1].endswith("0 errors")


@pytest.mark.slow
def test_speed_and_kept_drafts_are_reported_by_category(
    settings: str, questions: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafts.json"
    sizes = [*SIZES, "--rounds", "2"]
    printed = run(
        "drafts.py",
        *("--ngram", "--settings", settings, "--questions", questions, "--output", output),
        *sizes,
    )
    result = json.loads(output.read_text())
    assert result["num_prompts"] == {"qa": 1, "conversation": 2}
    figures = result["engines"]["ngram"]["conversation"]
    assert figures["equal_answers"] == 2
    assert figures["ratio"] > 0
    assert figures["tokens_per_step"] >= 1
    assert "| ngram |" in printed
