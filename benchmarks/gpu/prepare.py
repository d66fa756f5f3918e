"""Make a source tree look installed: what hotshoe's metadata say is read from pyproject.toml.

    python benchmarks/gpu/prepare.py FOLDER

Plugins are found by the entry points of an installed distribution. With FOLDER and the source
roots, which are printed, on PYTHONPATH, those of the tree are found, whatever is edited in it
later.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def write_metadata(folder: Path) -> None:
    """Write the ``.dist-info`` of the tree into a folder."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    source = (REPOSITORY / "framework" / "hotshoe" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)
    assert version is not None, "hotshoe/__init__.py names no version"
    info = folder / f"hotshoe-{version[1]}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hotshoe\nVersion: {version[1]}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {module}" for name, module in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def source_roots() -> list[Path]:
    """The folders that an editable installation puts on ``sys.path``."""
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    return [REPOSITORY / folder for folder in build["dev-mode-dirs"]]


if __name__ == "__main__":
    write_metadata(Path(sys.argv[1]))
    print(os.pathsep.join(map(str, source_roots())))
