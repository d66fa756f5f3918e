"""The page on drafters shows settings that work."""

from __future__ import annotations

import re
from pathlib import Path

from hotshoe.config import load_config
from hotshoe.plugins import PluginRegistry

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "how-to" / "speculative-decoding.md").read_text("utf-8")


def test_settings_on_the_page_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "engine.yaml").write_text(block)
        selected = load_config(tmp_path / "engine.yaml", env={}).config.spec_decode
        assert selected.name == "eagle"
        component = PluginRegistry().load("spec_decode", selected.name).component
        assert component.options(**selected.options).num_draft_tokens == 4


def test_every_drafter_is_on_the_page() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    installed = [one.name for one in PluginRegistry().installed("spec_decode") if one.is_builtin]
    assert sorted(listed) == sorted(installed)
