"""Objects without properties that their schema doesn't name, for a library that lets them come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "#/$defs/"
_OPEN = ("additionalProperties", "patternProperties", "propertyNames")


def closed(schema: Any) -> Any:
    """A schema whose objects have the properties that they name, and no others.

    Left as they are: objects that name none, say themselves what else may come, or need more than
    they name; and all that is said by several schemas together (``allOf``, what stands beside
    ``anyOf`` or ``$ref``), where each names a part.

    Args:
        schema: from ``enforceable``; not changed.
    """
    if not isinstance(schema, dict):
        return schema
    defs = schema.get("$defs", {})
    shared: set[str] = set()
    _find_shared({key: one for key, one in schema.items() if key != "$defs"}, shared, is_part=False)
    for one in defs.values():
        _find_shared(one, shared, is_part=False)
    waiting = list(shared)
    while waiting:
        found: set[str] = set()
        _find_shared(defs[waiting.pop()], found, is_part=True)
        waiting += found - shared
        shared |= found
    whole = _closed({key: one for key, one in schema.items() if key != "$defs"})
    if defs:
        whole["$defs"] = {
            name: one if name in shared else _closed(one) for name, one in defs.items()
        }
    return whole


def _is_combined(node: Mapping[str, Any]) -> bool:
    return "allOf" in node or (("anyOf" in node or "$ref" in node) and len(node) > 1)


def _find_shared(node: Any, shared: set[str], *, is_part: bool) -> None:
    """Names of definitions that are a part of what several schemas say."""
    if isinstance(node, list):
        for one in node:
            _find_shared(one, shared, is_part=is_part)
    if not isinstance(node, dict):
        return
    is_part = is_part or _is_combined(node)
    reference = node.get("$ref")
    if is_part and isinstance(reference, str):
        shared.add(reference.removeprefix(_PREFIX))
    for one in _below(node).values():
        _find_shared(one, shared, is_part=is_part)


def _below(node: Mapping[str, Any]) -> dict[str, Any]:
    """Subschemas by a name."""
    found = {
        key: node[key]
        for key in ("items", "additionalProperties", "allOf", "anyOf", "prefixItems")
        if isinstance(node.get(key), dict | list)
    }
    for key in ("properties", "patternProperties"):
        found |= {f"{key}.{name}": one for name, one in node.get(key, {}).items()}
    return found


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(one) for one in node]
    if not isinstance(node, dict) or _is_combined(node):
        return node
    found = dict(node)
    for key in ("items", "additionalProperties", "anyOf", "prefixItems"):
        if key in node:
            found[key] = _closed(node[key])
    for key in ("properties", "patternProperties"):
        if key in node:
            found[key] = {name: _closed(one) for name, one in node[key].items()}
    names = node.get("properties", {})
    is_enough = set(node.get("required", ())) <= set(names) and node.get("minProperties", 0) <= len(
        names
    )
    if names and is_enough and not any(key in node for key in _OPEN):
        found["additionalProperties"] = False
    return found
