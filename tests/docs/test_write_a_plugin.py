"""The how-to for plugin authors: its files are those of the example, its snippets run."""

import logging
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotshoe.testing
from hotshoe import LLM, SamplingParams, StructuredOutputs
from hotshoe.api import Component, RequestError
from hotshoe.testing.guided_decoding import GuidedDecodingConformance
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe.testing.plugins import make_distribution

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "how-to" / "write-a-plugin.md").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_files_are_those_of_the_example(generator: ModuleType) -> None:
    assert PAGE.count("<!-- file: ") == 4
    assert generator.with_files(PAGE) == PAGE, "run make docs"


def test_first_idea_runs(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet = blocks("python")[0].replace("LLM(", f"LLM({checkpoint!r}, ", 1)
    snippet = snippet.replace("max_model_len=2048", "max_model_len=64")
    assert "ShortestPromptFirst" in snippet
    (tmp_path / "idea.py").write_text(snippet)
    runpy.run_path(str(tmp_path / "idea.py"))
    lengths = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert sorted(lengths) == [len("short"), len("a long prompt, and then some")]


def test_observer_is_called_while_its_plugin_is_selected(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (source,) = [one for one in blocks("python") if "hotshoe_request_finished" in one]
    make_distribution(
        tmp_path / "site",
        modules={"preemption_counter": source},
        entry_points={"hotshoe.schedulers": {"watched": "preemption_counter"}},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    caplog.set_level(logging.INFO, "preemption_counter")
    with LLM(checkpoint, scheduler="watched") as llm:
        llm.generate("hello", SamplingParams(max_tokens=2))
    assert "offline-0/0 was preempted 0 times" in caplog.text


class TestBackendOfThePage(GuidedDecodingConformance):
    def component(self) -> Component:
        (source,) = [one for one in blocks("python") if "GuidedDecodingBackend" in one]
        module: dict[str, Any] = {}
        exec(source, module)
        found: Component = module["hotshoe_component"]()
        return found


def test_guided_decoding_backend_enforces_what_it_says(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = [one for one in blocks("python") if "GuidedDecodingBackend" in one]
    make_distribution(
        tmp_path / "site",
        modules={"choice_backend": source},
        entry_points={"hotshoe.guided_decoding": {"choices": "choice_backend"}},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for drafts in (None, "ngram"):
        with LLM(checkpoint, guided_decoding="choices", spec_decode=drafts) as llm:
            wanted = [StructuredOutputs(choice=("ja ja ja ja", "nein")) for _ in range(3)]
            params = [
                SamplingParams(temperature=1, seed=seed, structured_outputs=one)
                for seed, one in enumerate(wanted)
            ]
            outputs = llm.generate(["ja ja ja ja ja ja"] * 3, params)
            assert {output.text for output in outputs} <= {"ja ja ja ja", "nein"}
            with pytest.raises(RequestError, match="json is not among: choice"):
                llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(json="{}")))


def test_every_conformance_suite_is_listed_with_its_place() -> None:
    listed = re.findall(r"^\| `\w+` \| `(\w+)` \| `([\w.]+)` \|$", PAGE, re.MULTILINE)
    defined = [
        (name, f"hotshoe.testing.{path.stem}")
        for path in Path(hotshoe.testing.__file__).parent.glob("*.py")
        for name in re.findall(r"^class (\w+Conformance)\b", path.read_text(), re.MULTILINE)
    ]
    assert len(defined) > 5
    assert sorted(listed) == sorted(defined)
