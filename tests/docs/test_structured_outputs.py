"""The page on structured outputs: its code runs, its settings are accepted."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hotshoe.api import StructuredOutputs
from hotshoe.entrypoints.cli.main import main
from hotshoe.server.openai.schemas import CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "structured-outputs.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_offline_example_runs(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "river.py"
    script.write_text(blocks("python")[0].replace("LLM(", f"LLM({str(tiny_path)!r}, ", 1))
    runpy.run_path(str(script))
    assert re.search(r"length_km=[1-9]\d{0,3}$", capsys.readouterr().out)


def test_tables_are_those_of_the_recorded_runs(generator: ModuleType) -> None:
    assert PAGE.count("<!-- table: structured ") == 2
    assert generator.with_tables(PAGE) == PAGE, "run make docs"


def test_every_kind_of_constraint_is_described() -> None:
    kinds = {name for name in StructuredOutputs.__struct_fields__ if name != "backend"}
    assert {
        row for row in re.findall(r"^\| `(\w+)[`=]", PAGE, re.MULTILINE) if row in kinds
    } == kinds


def test_the_settings_are_accepted(tmp_path: Path) -> None:
    (settings,) = blocks("yaml")
    assert yaml.safe_load(settings)["guided_decoding"]["fallback"] is True
    path = tmp_path / "engine.yaml"
    path.write_text(settings)
    assert main(["config", "check", str(path)]) == 0


def test_the_body_of_the_curl_example_is_a_request() -> None:
    (command,) = [one for one in blocks("sh") if "curl" in one]
    body = json.loads(re.findall(r"-d '(.*)'$", command, re.DOTALL)[0])
    request = CompletionRequest.model_validate_json(json.dumps(body))
    assert not request.model_extra
    assert request.structured_outputs is not None
    assert request.structured_outputs.regex == "19[0-9]{2}"
