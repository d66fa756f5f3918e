"""Help text for every config flag, generated from the fields."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from hotshoe.config.flags import flag_of
from hotshoe.config.paths import ALIASES, Paths
from hotshoe.config.schema import EngineConfig
from hotshoe.config.values import split_optional

_WIDTH = 96


def describe_flags() -> str:
    """Every flag by section, with description and default, as text for a terminal."""
    paths = Paths.of(EngineConfig)
    groups: dict[str, list[str]] = {"": [], **{section: [] for section in paths.sections}}
    for path in paths.leaves:
        groups[path.rpartition(".")[0]].append(path)
    parts = []
    for section, members in groups.items():
        summary = section_summary(paths, section)
        entries = "\n".join(_describe(paths, path) for path in members)
        parts.append(f"{section or 'engine'}: {summary}\n{entries}")
    return "\n\n".join(parts)


def format_value(value: Any) -> str:
    """A config value as one would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return str(value)


def section_summary(paths: Paths, section: str) -> str:
    """What a section (or, for ``""``, the top level) is about."""
    if not section:
        return "What concerns the whole engine."
    return (inspect.getdoc(paths.sections[section]) or "").splitlines()[0]


def _describe(paths: Paths, path: str) -> str:
    field = paths.leaves[path]
    names = ", ".join(_flags(paths, path, field))
    default = "" if field.is_required() else f" (default: {format_value(field.get_default())})"
    text = f"{field.description}{default if not _is_options(path) else ''}"
    body = textwrap.fill(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {names} {_metavar(path, field)}".rstrip() + f"\n{body}"


def _flags(paths: Paths, path: str, field: FieldInfo) -> Iterator[str]:
    section = path.rpartition(".")[0]
    names = [alias for alias, target in ALIASES.items() if target == path]
    if section and paths.shorthand(section) == path:
        names.append(section)
    is_switch = split_optional(field.annotation)[0] is bool
    for name in [*names, path]:
        yield flag_of(name)
    if is_switch:
        yield flag_of(f"no_{(names or [path])[0]}")


def _metavar(path: str, field: FieldInfo) -> str:
    annotation, _ = split_optional(field.annotation)
    if _is_options(path):
        return "KEY=VALUE"
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        return "A,B,..."
    words = {bool: "", int: "N", float: "X"}
    return words.get(annotation, path.rpartition(".")[2].upper())


def _is_options(path: str) -> bool:
    return path.endswith(".options")
