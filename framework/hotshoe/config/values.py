"""Config values as people write and read them: text to value, field to "what is allowed", and
pydantic's complaints in our words.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from hotshoe.config.paths import Path, Paths, did_you_mean
from hotshoe.errors import ConfigError

if TYPE_CHECKING:
    from hotshoe.config.sources import Setting


def config_error(problems: Sequence[str]) -> ConfigError:
    """One error for all problems; a single one is the whole message."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    listed = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:{listed}")


def decode_text(field: FieldInfo, text: str) -> Any:
    """Turn text from a flag or variable into the field's type.

    Lists are JSON or comma-separated; mappings are JSON or ``key=value``. Text that doesn't fit is
    returned as it is, for validation to refuse.
    """
    annotation, _ = split_optional(field.annotation)
    if none_from_text(field, text) is None:
        return None
    if _is_kind(annotation, dict):
        return _decode_mapping(text)
    if _is_kind(annotation, tuple, list):
        return _decode_list(text)
    try:
        return TypeAdapter(annotation).validate_python(text)
    except ValidationError:
        return text


def none_from_text(field: FieldInfo | None, value: Any) -> Any:
    """None for the text ``none`` where the field allows None (TOML has no null), else the value."""
    if field is None or not isinstance(value, str) or value.lower() not in ("none", "null"):
        return value
    return None if split_optional(field.annotation)[1] else value


def decode_option(text: str) -> Any:
    """Read one option of a plugin: JSON containers, quoted text and null are parsed, other text is
    left for the plugin's model to convert.
    """
    if text == "null":
        return None
    return _json_or_text(text) if text[:1] in ("[", "{", '"') else text


def _decode_mapping(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return _json_or_text(text)
    key, equals, value = text.partition("=")
    return {key.strip().replace("-", "_"): decode_option(value)} if equals and key.strip() else text


def _decode_list(text: str) -> Any:
    if text.lstrip().startswith("["):
        return _json_or_text(text)
    return [item.strip() for item in text.split(",")] if text.strip() else []


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """The annotation without None and outer ``Annotated``, and whether None was among it."""
    allows_none = False
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [arg for arg in get_args(annotation) if arg is not type(None)]
        allows_none = len(inner) < len(get_args(annotation))
        annotation = inner[0] if len(inner) == 1 else Union[tuple(inner)]  # noqa: UP007  # built at run time
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    return annotation, allows_none


def _is_kind(annotation: Any, *kinds: type) -> bool:
    return (get_origin(annotation) or annotation) in kinds


def describe_allowed(field: FieldInfo) -> str:
    """What a field accepts, in words: ``an integer >= 1, or none``."""
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and "allowed" in extra:
        return str(extra["allowed"])
    annotation, allows_none = split_optional(field.annotation)
    text = _describe_type(annotation) + _describe_bounds(field.metadata)
    return f"{text}, or none" if allows_none else text


def _describe_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(annotation))
    if _is_kind(annotation, tuple, list):
        item = split_optional(get_args(annotation)[0])[0] if get_args(annotation) else str
        return f"a list of {_describe_items(item)}"
    if _is_kind(annotation, dict):
        return "a mapping"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _describe_items(item: Any) -> str:
    """What a list holds, in the plural."""
    if _is_kind(item, tuple, list):
        inner = split_optional(get_args(item)[0])[0] if get_args(item) else str
        return f"lists of {_describe_items(inner)}"
    if _is_kind(item, dict) or (isinstance(item, type) and issubclass(item, BaseModel)):
        return "mappings"
    return {int: "integers", float: "numbers"}.get(item, "text")


def _describe_bounds(metadata: Sequence[Any]) -> str:
    bounds = []
    for item in metadata:
        for kind, sign in (("Ge", ">="), ("Gt", ">"), ("Le", "<="), ("Lt", "<")):
            if isinstance(item, getattr(annotated_types, kind)):
                bounds.append(f"{sign} {getattr(item, kind.lower())}")
        if isinstance(item, annotated_types.MinLen):
            bounds.append("that is not empty")
    return f" {' and '.join(bounds)}" if bounds else ""


def validation_problems(
    error: ValidationError, settings: Mapping[Path, Setting], paths: Paths
) -> list[str]:
    """One line per complaint, with path, value, what is allowed, and where the value came from."""
    problems: list[str] = []
    for item in error.errors(include_url=False):
        keys = tuple(str(key) for key in item["loc"])
        if not keys:
            text = str(item.get("ctx", {}).get("error", item["msg"]))
            problems.extend(text.splitlines())
            continue
        origin = _origin(keys, settings)
        if item["type"] == "extra_forbidden":
            problems.append(unknown_key(keys, paths, origin))
        else:
            allowed = _allowed(keys, item, paths)
            problems.append(f"{dotted(keys)}: got {item['input']!r} ({origin}), allowed: {allowed}")
    return problems


def unknown_key(keys: Path, paths: Paths, origin: str) -> str:
    """The complaint about a key that no section has."""
    *parent, key = keys
    known = _known_keys(tuple(parent), paths)
    hint = did_you_mean(key, known)
    if not hint and not parent:
        hint = did_you_mean(key, paths.names())
    return f"{dotted(keys)}: unknown key ({origin}); known: {', '.join(known)}{hint}"


def _known_keys(parent: Path, paths: Paths) -> list[str]:
    prefix = "".join(f"{key}." for key in parent)
    names = [*paths.leaves, *paths.sections]
    inside = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
    return sorted(inside) or _item_keys(parent, paths)


def _item_keys(parent: Path, paths: Paths) -> list[str]:
    """Keys of the models that a list holds: ``sampler.logits_processors.0``."""
    field = paths.leaves.get(".".join(parent[:-1]))
    if field is None or not get_args(field.annotation):
        return []
    item = get_args(field.annotation)[0]
    return sorted(item.model_fields) if hasattr(item, "model_fields") else []


def _allowed(keys: Path, item: Mapping[str, Any], paths: Paths) -> str:
    field = paths.leaves.get(".".join(keys))
    if field is not None:
        return describe_allowed(field)
    message = str(item["msg"])
    return message[:1].lower() + message[1:]


def _origin(keys: Path, settings: Mapping[Path, Setting]) -> str:
    for length in range(len(keys), 0, -1):
        if keys[:length] in settings:
            return settings[keys[:length]].origin
    return "default"


def dotted(keys: Sequence[str]) -> str:
    """``a.b``, with ``[0]`` for positions in lists."""
    text = ""
    for key in keys:
        text += f"[{key}]" if key.isdigit() else f".{key}" if text else key
    return text
