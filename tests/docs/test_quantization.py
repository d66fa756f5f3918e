"""The page on quantization shows what was measured, and settings that work."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hotshoe.config import load_config
from hotshoe.plugins import PluginRegistry

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "how-to" / "quantization.md").read_text("utf-8")


@pytest.fixture(scope="module")
def quality() -> Any:
    path = REPOSITORY / "benchmarks" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_quality_table_is_that_of_the_recorded_run(quality: Any) -> None:
    record = REPOSITORY / "benchmarks" / "results" / "cpu-2-cores-quality.json"
    results = json.loads(record.read_text("utf-8"))["results"]
    shown = re.search(r"<!-- quality: begin -->\n(.*?)\n<!-- quality: end -->", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] == quality.table(results)
    assert all(result["num_positions"] == 6377 for result in results.values())
    assert results["cpu-bf16"]["agreement"] >= 0.97
    assert results["cpu-bf16-kv-int8"]["agreement"] >= 0.96
    assert results["cpu-int8"]["agreement"] >= 0.95
    assert results["cpu-gguf"]["agreement"] >= 0.95


def test_settings_on_the_page_are_valid(tmp_path: Path) -> None:
    registry = PluginRegistry()
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        (tmp_path / "engine.yaml").write_text(block)
        selected = load_config(tmp_path / "engine.yaml").config.quantization
        component = registry.load("quantization", selected.name).component
        component.options(**selected.options)
