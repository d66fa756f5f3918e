"""Structural tags as the xgrammar library enforces them: what is in them checked and rewritten,
blanks in JSON bounded, the older form said in the newer one.
"""

from __future__ import annotations

from typing import Any

from hotshoe.api import RequestError
from hotshoe_guided_decoding import json_schema, schema_rules, texts


def enforceable(tag: Any, max_whitespace: int) -> tuple[Any, list[str]]:
    """A structural tag as the library enforces it, and why it can't be, by path.

    Args:
        tag: from ``json_schema.parse``; not changed.
        max_whitespace: most blanks between the parts of a JSON text, where the tag doesn't say; the
            library has no tags without any.

    Raises:
        RequestError: if it's malformed.
    """
    return _part(_newer(tag), "", max(max_whitespace, 1))


def _newer(tag: Any) -> Any:
    """``structures`` and ``triggers``, which the library doesn't read any more, as a format."""
    if not isinstance(tag, dict) or "format" in tag or "structures" not in tag:
        return tag
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise RequestError("structures and triggers: expected lists")
    tags = []
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or set(one) != {"begin", "schema", "end"}:
            raise RequestError(f"structures[{index}]: expected an object of begin, schema and end")
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def _part(part: Any, path: str, max_whitespace: int) -> tuple[Any, list[str]]:
    if isinstance(part, list):
        found, reasons = [], []
        for index, one in enumerate(part):
            rewritten, whys = _part(one, f"{path}[{index}]", max_whitespace)
            found.append(rewritten)
            reasons += whys
        return found, reasons
    if not isinstance(part, dict):
        return part, []
    kind, rewritten, reasons = part.get("type"), dict(part), _against(part, path)
    for key, value in part.items():
        where = f"{path}.{key}" if path else key
        if key == "json_schema" and isinstance(value, dict | bool):
            rewritten[key], whys = json_schema.enforceable(value, schema_rules.XGRAMMAR)
            reasons += [f"{where}.{why}" for why in whys]
        else:
            rewritten[key], whys = _part(value, where, max_whitespace)
            reasons += whys
    if kind == "json_schema" and part.get("max_whitespace_cnt") is None:
        rewritten["max_whitespace_cnt"] = max_whitespace
    return rewritten, reasons


def _against(part: dict[str, Any], path: str) -> list[str]:
    """Why a format can't be enforced, whatever is in it."""
    where = f"{path}." if path else ""
    if part.get("type") == "json_schema" and part.get("any_order"):
        return [f"{where}any_order: not enforced: required names could be missing or repeated"]
    for kind, key in (("regex", "pattern"), ("grammar", "grammar")):
        value = part.get(key)
        if part.get("type") == kind and isinstance(value, str):
            depth = texts.max_depth(value)
            if depth > texts.MAX_DEPTH:
                allowed = f"allowed: up to {texts.MAX_DEPTH}"
                return [f"{where}{key}: brackets are nested {depth} deep, {allowed}"]
            if kind == "regex" and (why := texts.misread(value)):
                return [f"{where}{key}: {why}"]
    return []
