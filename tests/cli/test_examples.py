"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import ENVIRONMENT
from hotshoe.entrypoints.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_offline_example_completes_prompts_and_streams_an_answer(tiny_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "offline_generate.py", tiny_path],
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition("|")[0] for line in lines[:3]] == [
        "The capital of France is",
        "The opposite of hot is",
        "One, two, three,",
    ]
    assert len("".join(lines[3:])) > 10


@pytest.mark.slow
def test_the_extraction_example_fits_its_model_and_its_choices(tiny_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "extract_structured.py", tiny_path],
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    crossing, *reviews = done.stdout.split("\n")[:-1]
    place = "(Harwich|Hook of Holland|Dover)"
    assert re.search(rf" \| {place} - {place} \| [1-9][0-9]? h$", crossing)
    assert len(reviews) == 2
    assert all(review.endswith((" -> positive", " -> negative")) for review in reviews)


def test_the_config_example_is_right_and_an_engine_starts_from_it(
    tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(EXAMPLES / "engine.yaml")
    assert main(["config", "check", file]) == 0
    flags = ["--model", str(tiny_path), "--max-model-len", "64", "--max-tokens", "4"]
    assert main(["generate", "a", "--config", file, *flags]) == 0
    assert capsys.readouterr().err == ""
