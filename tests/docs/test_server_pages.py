"""The tutorial of the server and the how-to for benchmarks: their commands run as they stand."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import COMMAND, ENVIRONMENT
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "tutorial" / "first-server.md").read_text()
BENCHMARK = (DOCS / "how-to" / "benchmark.md").read_text()
URL = "http://127.0.0.1:8000"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{second:02}.5000000,{100 + second},40\n" for second in range(12)
)

pytestmark = pytest.mark.slow


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


class Place:
    """A folder with the tutorial's file, and its server, on a tiny model and a free port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = tiny_llama_config(max_position_embeddings=2048)
        path = write_tiny_checkpoint(folder / "tiny", config)
        (yaml,) = blocks(TUTORIAL, "yaml")
        changes = {"path: embedded ": f"path: {path} ", "port: 8000": "port: 0"}
        for before, after in changes.items():
            assert before in yaml
            yaml = yaml.replace(before, after)
        (folder / "server.yaml").write_text(yaml)
        (folder / "trace.csv").write_text(TRACE)
        (command,) = re.findall(r"^\$ hotshoe (serve .*)$", TUTORIAL, re.MULTILINE)
        self.process = subprocess.Popen(
            [COMMAND, *command.split()],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        self.said = [self.process.stdout.readline() for _ in range(10)]
        self.url = self.said[0].split()[-1]

    def run(self, command: str) -> str:
        """Run a command of a page; returns what it prints."""
        assert command.count(URL) <= 1
        script = re.sub(r"\bhotshoe (?=[a-z])", f"{COMMAND} ", command.replace(URL, self.url))
        script = script.replace("curl ", "curl -sS ")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            check=False,
            cwd=self.folder,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("tutorial"))
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


def test_the_server_says_what_the_tutorial_shows(place: Place) -> None:
    (shown,) = blocks(TUTORIAL, "console")
    _, *lines = shown.splitlines(keepends=True)
    assert [line.replace(place.url, URL) for line in place.said] == lines


def test_every_command_of_the_tutorial_runs(place: Place) -> None:
    outputs = []
    for block in blocks(TUTORIAL, "bash"):
        commands = [block] if "\\\n" in block else block.splitlines()
        outputs += [place.run(command) for command in commands]
    checked, health, models, answer, stream, mistake, chat, metrics, load = outputs
    assert "server.yaml" in checked
    assert json.loads(health) == {"status": "ok"}
    assert json.loads(models)["data"][0]["id"] == "smollm2"
    assert json.loads(answer)["choices"][0]["message"]["content"]
    assert json.loads(answer)["usage"]["completion_tokens"] <= 48
    events = [line for line in stream.splitlines() if line]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["usage"]["completion_tokens"] <= 24
    assert json.loads(mistake)["error"]["param"] == "temperature"
    assert chat.strip()
    assert "hotshoe:generation_tokens_total{" in metrics
    assert "requests succeeded                 16" in load


def test_the_python_client_prints_the_same_haiku_twice(place: Place) -> None:
    (snippet,) = blocks(TUTORIAL, "python")
    (place.folder / "ask.py").write_text(snippet.replace(URL, place.url))
    texts = [
        subprocess.run(
            [sys.executable, "ask.py"], stdout=subprocess.PIPE, check=True, cwd=place.folder
        ).stdout
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0].strip()


def test_every_command_of_the_benchmark_page_runs(place: Place) -> None:
    commands = [line for block in blocks(BENCHMARK, "bash") for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        shown = place.run(command)
        assert "requests failed                     0" in shown
        assert ("goodput" in command) == ("goodput requests/s" in shown)


def test_ctrl_c_ends_the_server(place: Place) -> None:
    place.process.send_signal(signal.SIGINT)
    assert place.process.wait(60) == 0


@pytest.mark.parametrize("page", [TUTORIAL, BENCHMARK])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((\.\.?/[^)#]+)", page)
    for target in targets:
        assert (DOCS / "tutorial" / target).resolve().exists(), target
