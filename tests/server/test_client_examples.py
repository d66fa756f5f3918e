"""What the examples and how-tos do with OpenAI's client works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cli.command import ENVIRONMENT
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe.testing.plugins import make_distribution
from server.command import RunningServer, start_server

REPOSITORY = Path(__file__).parents[2]
PROCESSOR = REPOSITORY / "examples" / "custom_logits_processor"
TOOL_CALLS = (REPOSITORY / "docs" / "how-to" / "tool-calls.md").read_text("utf-8")
URL = "http://127.0.0.1:8000"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with room for tools in the prompt, and the logits processor of the examples."""
    config = tiny_llama_config(max_position_embeddings=4096)
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), config)
    site = make_distribution(
        tmp_path_factory.mktemp("site"),
        modules={},
        entry_points={"hotshoe.logits_processors": {"no_repeat_ngram": "hotshoe_no_repeat"}},
    )
    sources = f"{site}{os.pathsep}{PROCESSOR / 'src'}"
    environment = ENVIRONMENT | {"PYTHONPATH": sources}
    flags = ("--config", str(PROCESSOR / "engine.yaml"))
    with start_server(str(path), *flags, environment=environment) as server:
        yield server


@pytest.fixture
def run(served: RunningServer) -> Callable[[str], list[str]]:
    """Runs a script against the server; the lines it prints."""

    def run_one(source: str) -> list[str]:
        assert URL in source
        done = subprocess.run(
            [sys.executable, "-c", source.replace(URL, served.url)],
            capture_output=True,
            text=True,
            errors="replace",
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")

    return run_one


def test_the_extraction_example_fits_its_model_and_its_choices(
    run: Callable[[str], list[str]],
) -> None:
    example = REPOSITORY / "examples" / "extract_over_http.py"
    crossing, colour, _ = run(example.read_text("utf-8"))
    place = "(Harwich|Hook of Holland|Dover)"
    assert re.search(rf" \| {place} - {place} \| [1-9][0-9]? h$", crossing)
    assert colour in ("red", "green", "blue")


def test_the_how_to_gets_a_tool_call_and_sends_its_result(
    run: Callable[[str], list[str]],
) -> None:
    calling, answering = re.findall(
        r"^```python\n(.*?)^```$", TOOL_CALLS, re.DOTALL | re.MULTILINE
    )[:2]
    first, *_ = run(calling + answering)
    assert re.fullmatch(r"get_weather \{'city': '(Oslo|Rome)', 'days': [123]\}", first)


def test_the_example_of_a_logits_processor_is_asked_for_by_name(served: RunningServer) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 60, "return_token_ids": True}
    body |= {"allowed_token_ids": list(range(97, 105)), "ignore_eos": True}
    asking = {"logits_processors": ["no_repeat_ngram"], "extra_args": {"no_repeat_ngram_size": 3}}
    repeats = []
    for fields in ({}, asking):
        answer = httpx.post(f"{served.url}/v1/completions", json=body | fields).json()
        tokens = answer["choices"][0]["token_ids"]
        ngrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
        repeats.append(len(set(ngrams)) < len(ngrams))
    assert repeats == [True, False]
    wrong = asking | {"extra_args": {"no_repeat_ngram_size": -1}}
    refused = httpx.post(f"{served.url}/v1/completions", json=body | wrong)
    assert refused.status_code == 400
    assert "no_repeat_ngram_size is -1; allowed: a whole number >= 0" in refused.text
