"""JSON schemas beside each other: what a reference names, and which ones exclude one another."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from hotshoe_guided_decoding.schema_rules import has_type, same, types_allowed, values_allowed

_MAX_STEPS = 8


def is_pointer(reference: str) -> bool:
    """Whether a reference is into its own document."""
    return reference == "#" or reference.startswith("#/")


def pointed_at(reference: str, root: Any) -> tuple[Any] | None:
    """What a pointer names in a document, in a tuple; None if there is nothing."""
    found = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return (found,)


def are_disjoint(one: Any, other: Any, root: Any, depth: int = 0) -> bool:
    """Whether it's sure that no value satisfies both of two schemas of a document."""
    one, other = _followed(one, root), _followed(other, root)
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_STEPS:
        return False
    values, other_values = values_allowed(one), values_allowed(other)
    if values is not None and other_values is not None:
        return not any(same(value, found) for value in values for found in other_values)
    for some, schema in ((values, other), (other_values, one)):
        if some is not None and "type" in schema:
            return not any(has_type(value, schema["type"]) for value in some)
    types, other_types = types_allowed(one), types_allowed(other)
    if types and other_types and not types & other_types:
        return True
    if types != {"object"} or other_types != {"object"}:
        return False
    common = set(one.get("required", ())) & set(other.get("required", ()))
    mine, others = one.get("properties", {}), other.get("properties", {})
    return any(
        name in mine and name in others and are_disjoint(mine[name], others[name], root, depth + 1)
        for name in common
    )


def _followed(schema: Any, root: Any) -> Any:
    """What a schema refers to, if it's a reference; None if that isn't known."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        target = pointed_at(schema["$ref"], root) if is_pointer(schema["$ref"]) else None
        schema = target[0] if target else None
    return None
