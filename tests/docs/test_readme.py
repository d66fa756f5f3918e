"""What the README shows works."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.testing.plugins import make_distribution
from server.command import start_server

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    """Code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_python_example_runs_on_the_embedded_model() -> None:
    example = blocks("python")[0]
    result = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=True
    )
    (continued_one, continued_two) = re.findall(r"^(.*) ->", result.stdout, re.MULTILINE)[-2:]
    assert (continued_one, continued_two) == ("One, two,", "Red, green,")
    # the answer, then the time to its first token
    assert re.search(r"(?i)river|loire|seine|rhone.* 0\.\d+$", result.stdout, re.MULTILINE)


def test_the_structured_example_fits_its_model(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [one for one in blocks("python") if "StructuredOutputs" in one]
    script = tmp_path / "review.py"
    script.write_text(example.replace("LLM(", f"LLM({str(tiny_path)!r}, ", 1))
    runpy.run_path(str(script))
    shown = capsys.readouterr().out
    assert re.fullmatch(r"feeling='(posi|nega)tive' stars=[1-5]\n", shown)


def test_the_plugin_example_is_a_working_scheduler(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = blocks("python")[-1]
    (metadata,) = blocks("toml")
    name, module = re.findall(r'^(\w+) = "(\w+)"$', metadata, re.MULTILINE)[0]
    site = make_distribution(
        tmp_path,
        name="my-package",
        modules={module: source},
        entry_points={"hotshoe.schedulers": {name: module}},
    )
    monkeypatch.syspath_prepend(site)
    with LLM(str(tiny_path), max_model_len=64, scheduler=name) as llm:
        assert llm.components["scheduler"].startswith("shortest (my-package")
        output = llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.slow
def test_the_curl_example_gets_an_answer(tiny_path: Path) -> None:
    (block,) = [one for one in blocks("bash") if "curl " in one]
    curl = block[block.index("curl ") :]
    with start_server(str(tiny_path), "--served-model-name", "embedded") as server:
        result = subprocess.run(
            ["bash", "-c", curl.replace("http://127.0.0.1:8000", server.url)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    answer = json.loads(result.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0
