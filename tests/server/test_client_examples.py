"""What the examples and how-tos do with OpenAI's client works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.command import ENVIRONMENT
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from server.command import start_server

REPOSITORY = Path(__file__).parents[2]
TOOL_CALLS = (REPOSITORY / "docs" / "how-to" / "tool-calls.md").read_text("utf-8")
URL = "http://127.0.0.1:8000"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[str]]]:
    """Runs a script against a server with room for tools in the prompt; the lines it prints."""
    config = tiny_llama_config(max_position_embeddings=4096)
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), config)
    with start_server(str(path)) as server:

        def run_one(source: str) -> list[str]:
            assert URL in source
            done = subprocess.run(
                [sys.executable, "-c", source.replace(URL, server.url)],
                capture_output=True,
                text=True,
                errors="replace",
                env=ENVIRONMENT,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.split("\n")

        yield run_one


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
