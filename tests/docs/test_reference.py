"""The generated reference says what the source says, and leaves nothing out."""

from pathlib import Path
from types import ModuleType

import pytest

import hotshoe.api
from hotshoe.api import KINDS, hooks

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["contracts", "hooks", "metrics"])
def test_reference_is_up_to_date(generator: ModuleType, name: str) -> None:
    expected = getattr(generator, f"{name}_reference")()
    found = (DOCS / "reference" / f"{name}.md").read_text()
    assert found == expected, "run make docs"


def test_every_kind_and_every_public_class_has_an_entry() -> None:
    text = (DOCS / "reference" / "contracts.md").read_text()
    for kind in KINDS.values():
        assert f"## {kind.name}\n" in text
        assert f"| `{kind.group}` | `{kind.section}` | `{kind.current}` |" in text
        assert f"### `{kind.interface.partition(':')[2]}`" in text
    undescribed = [
        name
        for name in hotshoe.api.__all__
        if name.endswith(("Context", "Capabilities", "Batch", "Input", "View", "Spec", "Planner"))
        and f"### `{name}`" not in text
    ]
    assert undescribed == []


def test_every_hook_has_an_entry() -> None:
    text = (DOCS / "reference" / "hooks.md").read_text()
    names = [name for name in vars(hooks) if name.startswith("hotshoe_")]
    assert len(names) >= 4
    for name in names:
        assert f"## `{name}`\n" in text
