"""Throw-away distributions: what a plugin package looks like once installed, for tests of plugins
and of the loader.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path


def make_distribution(
    folder: Path,
    name: str = "acme",
    version: str = "1.0",
    *,
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
) -> Path:
    """Write modules and the metadata of an installed distribution. Put the returned folder on
    ``sys.path`` (``monkeypatch.syspath_prepend``) and its plugins are found.

    Args:
        folder: where to write; several distributions may share one.
        name: of the distribution.
        version: of the distribution.
        modules: source by dotted module name; it's dedented. Parent packages are made as needed.
        entry_points: by group, the entry point's name and ``module`` or ``module:attribute``.

    Returns:
        The folder.
    """
    for module, source in modules.items():
        _write_module(folder, module, source)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def _write_module(folder: Path, module: str, source: str) -> None:
    *packages, last = module.split(".")
    for package in packages:
        folder = folder / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{last}.py").write_text(textwrap.dedent(source))
