"""Structural tags: constraints on text with calls in it, as xgrammar reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotshoe.api import GrammarSpec, Tool, ToolChoice

Format = dict[str, Any]

MAX_CALLS = 8
"""Of one output that must be calls: a small model would write calls for ever."""

MAX_SPACES = 1
"""In a row, between the parts of a JSON value: a small model would write spaces for ever."""


def json_format(schema: Mapping[str, Any] | bool) -> Format:
    """A JSON value that follows a schema."""
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": MAX_SPACES,
    }


def const(text: str) -> Format:
    """This text."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def arguments_schema(choice: ToolChoice, tool: Tool) -> Mapping[str, Any]:
    """What the arguments must follow: the schema, unless the client leaves it to the model."""
    if choice.is_required or tool.is_strict:
        return tool.parameters
    return {"type": "object"}


def calls(
    choice: ToolChoice, separator: str, tag: Callable[[Tool], tuple[str, Format, str]]
) -> Format:
    """One call or several, and nothing else.

    Args:
        separator: between two calls.
        tag: the begin, content and end of a call.
    """
    one = either([_tag(*tag(tool)) for tool in choice.tools])
    if not choice.allows_parallel:
        return one
    more = sequence(const(separator), one)
    return sequence(one, {"type": "repeat", "min": 0, "max": MAX_CALLS - 1, "content": more})


def text_with_calls(
    choice: ToolChoice, trigger: str, tag: Callable[[Tool], tuple[str, Format, str]]
) -> Format:
    """Free text; after the trigger, a call."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [_tag(*tag(tool)) for tool in choice.tools],
        "at_least_one": False,
        "stop_after_first": not choice.allows_parallel,
    }


def text_or(first: Format, reserved: str) -> Format:
    """Either calls, or free text that doesn't begin as they do."""
    free = {"type": "regex", "pattern": rf"([^\s{reserved}][\s\S]*)?"}
    return {"type": "or", "elements": [first, free]}


def spec(root: Format) -> GrammarSpec:
    """The constraint as a backend takes it."""
    value = json.dumps({"type": "structural_tag", "format": root}, ensure_ascii=False)
    return GrammarSpec(kind="structural_tag", value=value)


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
