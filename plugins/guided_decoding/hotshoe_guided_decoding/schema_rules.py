"""JSON schemas: the keywords, which of them each library enforces, what their values may be, and
what values they are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotshoe.api import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a library enforces.

    Attributes:
        library: its name, for messages.
        keywords: what it enforces in some setting.
        formats: values of ``format`` that it enforces to the letter.
        combines: whether all keywords of a schema hold together, whichever they are.
    """

    library: str
    keywords: frozenset[str]
    formats: frozenset[str]
    combines: bool


_STRING = ("minLength", "maxLength", "pattern", "format")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems")
_OBJECT = ("properties", "required", "additionalProperties", "patternProperties")
SIZES = ("minProperties", "maxProperties")
_CHOICES = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
        *("writeOnly", "$schema", "$comment", "$defs", "definitions", "$vocabulary", "nullable"),
        *("contentEncoding", "contentMediaType", "contentSchema", "$anchor"),
        # what editors read
        *("markdownDescription", "enumDescriptions", "markdownEnumDescriptions", "enumNames"),
        *("defaultSnippets", "deprecationMessage", "doNotSuggest", "errorMessage"),
        *("propertyOrder", "$id"),
    }
)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
KIND_OF = {
    **dict.fromkeys(_STRING, "string"),
    **dict.fromkeys(_NUMBER, "number"),
    **dict.fromkeys((*_ARRAY, "uniqueItems"), "array"),
    **dict.fromkeys((*_OBJECT, *SIZES, "propertyNames"), "object"),
}
_KNOWN = frozenset(
    (*_STRING, *_NUMBER, *_ARRAY, "uniqueItems", *_OBJECT, *SIZES, *_CHOICES, "type")
)

XGRAMMAR = Rules(
    library="xgrammar",
    keywords=_KNOWN | {"propertyNames"},
    formats=frozenset(
        {
            *("email", "uuid", "ipv6", "uri", "uri-reference", "duration"),
            *("json-pointer", "relative-json-pointer", "uri-template"),
        }
    ),
    combines=False,
)
LLGUIDANCE = Rules(
    library="llguidance",
    keywords=_KNOWN,
    formats=frozenset(("email", "uuid", "ipv4", "ipv6", "uri", "duration")),
    combines=True,
)


def malformed(path: str, value: Any, allowed: str) -> RequestError:
    """An error about a value in a schema."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{path or 'the schema'}: got {shown}, allowed: {allowed}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**6


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(one, str) and one in _TYPES for one in names)


_TEXT = ("a text", lambda value: isinstance(value, str))
_NUMERIC = ("a number", _is_number)
_COUNT = ("a whole number from 0 to 1000000", _is_count)
_LIST = ("a list of at least one schema", lambda value: isinstance(value, list) and bool(value))
_MAPPING = ("an object", lambda value: isinstance(value, dict))
SHAPES: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    **dict.fromkeys(_NUMBER, _NUMERIC),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", *SIZES), _COUNT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "propertyNames"), _MAPPING),
    "prefixItems": ("a list of schemas", lambda value: isinstance(value, list)),
    "required": ("a list of texts", _are_texts),
    "enum": ("a list of at least one value", lambda value: isinstance(value, list) and value),
    "type": (f"one or more of {', '.join(_TYPES)}", _is_type),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
}


def has_type(value: Any, allowed: Any) -> bool:
    """Whether a value is of one of the types that ``type`` allows."""
    if allowed is None:
        return True
    names = allowed if isinstance(allowed, list) else [allowed]
    return bool(types_of(value) & set(names))


def types_of(value: Any) -> set[str]:
    """The types of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return {kinds.get(type(value), "null")}


def types_allowed(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows by name; empty = it names none."""
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(named or ())
    return names | {"integer"} if "number" in names else names


def values_allowed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true isn't 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
