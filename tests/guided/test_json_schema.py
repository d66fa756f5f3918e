"""What of a JSON schema is enforced: an instance passes only if the schema has it, and a keyword
that isn't enforced is refused by its path.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from guided.conftest import Walker
from hotshoe.api import GrammarSpec, RequestError

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


def an_object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


CASES: dict[str, tuple[Any, list[Any]]] = {
    "lengths": ({"type": "string", "minLength": 1, "maxLength": 2}, ['""', '"a"', '"éü"', '"abc"']),
    "pattern": ({"type": "string", "pattern": "^[a-c]{2}$"}, ['"ab"', '"abc"', '"x"']),
    "class without letters": (
        {"type": "string", "pattern": "^[^a]$"},
        ['"b"', '"a"', '"""', '"\\"'],
    ),
    "any character": ({"type": "string", "pattern": "^.$"}, ['"b"', '"""', '"\\"', '"\n"', '""']),
    "date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2023-02-29"', '"2024-04-31"', '"2000-02-29"', '"1900-02-29"', '"x"'],
    ),
    "ipv4": ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"', '"10.0.0.256"', '"01.2.3.4"']),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"', '"123"'],
    ),
    "bounds": ({"type": "integer", "minimum": -13, "maximum": 217}, [-14, -13, 0, 217, 218]),
    "exclusive bounds": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
        [0, "0.0", 0.1, 4.99, 5, "5.00", "5e1", "-0"],
    ),
    "bound between integers": ({"type": "integer", "minimum": 1.5}, [1, 2]),
    "both lower bounds": ({"type": "integer", "minimum": 5, "exclusiveMinimum": 5}, [5, 6]),
    "multiple of an integer": ({"type": "integer", "multipleOf": 3}, [3, 4, 0, -6, -5]),
    "number of items": ({"type": "array", "minItems": 1, "maxItems": 2}, [[], [1], [1, 2, 3]]),
    "tuple": (
        {"type": "array", "prefixItems": [INTEGER, TEXT], "items": False},
        [[1, "a"], ["a", 1], [1, "a", 2]],
    ),
    "tuple of old drafts": (
        {"type": "array", "items": [INTEGER], "additionalItems": TEXT},
        [[1, "a"], [1, 2], ["a"]],
    ),
    "at most one item is unique": (
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        [[1], [1, 1]],
    ),
    "required": (
        an_object(properties={"a": INTEGER, "b": TEXT}, required=["a"]),
        [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": "x"}],
    ),
    "required without a property": (
        an_object(properties={"a": INTEGER}, required=["a", "z"]),
        [{"a": 1}, {"a": 1, "z": 2}],
    ),
    "closed": (
        an_object(properties={"a": INTEGER}, additionalProperties=False),
        [{}, {"a": 1}, {"b": 1}],
    ),
    "others": (
        an_object(properties={"a": INTEGER}, required=["a"], additionalProperties=TEXT),
        [{"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "b": 2}],
    ),
    "forbidden property": (
        an_object(properties={"a": False, "b": INTEGER}, additionalProperties=False),
        [{"b": 1}, {"a": 1}],
    ),
    "constants": ({"enum": ["Zürich", "\n", 1, None, True]}, ['"Zürich"', '"Bern"', 1, 2, "null"]),
    "constants of a type": ({"type": "string", "enum": ["a", 1]}, ['"a"', 1]),
    "reference": (
        {"$defs": {"p": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/p"}},
        [[1], ["a"]],
    ),
    "recursion": (
        an_object(
            properties={"c": {"type": "array", "items": {"$ref": "#"}}},
            required=["c"],
            additionalProperties=False,
        ),
        [{"c": []}, {"c": [{"c": []}]}, {"c": [1]}, {"c": [{}]}],
    ),
    "list of types": ({"type": ["string", "null"], "maxLength": 1}, ["null", '"a"', '"ab"', 1]),
    "keyword without a type": ({"minLength": 2}, ['"a"', '"ab"']),
    "any of": ({"anyOf": [INTEGER, {"const": "x"}]}, [1, '"x"', '"y"']),
    "one of, told apart by a constant": (
        {
            "oneOf": [
                an_object(properties={"k": {"const": "a"}, "v": INTEGER}, required=["k", "v"]),
                an_object(properties={"k": {"const": "b"}, "v": TEXT}, required=["k", "v"]),
            ]
        },
        [{"k": "a", "v": 1}, {"k": "a", "v": "x"}, {"k": "b", "v": "x"}],
    ),
    "all of one": ({"allOf": [{"type": "integer", "minimum": 3}]}, [2, 3]),
    "annotations": (
        {"title": "t", "description": "d", "default": 1, "examples": [1], "x-mine": 2, **INTEGER},
        [1, '"a"'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_instance_passes_that_the_schema_does_not_have(walker: Walker, name: str) -> None:
    schema, instances = CASES[name]
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    if name == "tuple of old drafts":
        validator = jsonschema.Draft7Validator
    checker = validator(schema, format_checker=jsonschema.FormatChecker())
    passed = 0
    for instance in instances:
        text = instance if isinstance(instance, str) else json.dumps(instance, ensure_ascii=False)
        try:
            is_valid = checker.is_valid(json.loads(text))
        except ValueError:
            is_valid = False
        is_taken = walker.takes_json(schema, text)
        assert is_valid or not is_taken, text
        passed += is_taken
    assert passed


REFUSED: dict[str, tuple[Any, str]] = {
    "uniqueItems": (
        an_object(properties={"a": {"type": "array", "uniqueItems": True}}),
        "properties.a.uniqueItems",
    ),
    "not": ({"type": "string", "not": {"const": "a"}}, "not"),
    "if": ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, "if"),
    "contains": ({"type": "array", "contains": INTEGER}, "contains"),
    "dependentRequired": (an_object(dependentRequired={"a": ["b"]}), "dependentRequired"),
    "unevaluatedProperties": (an_object(unevaluatedProperties=False), "unevaluatedProperties"),
    "overlapping oneOf": ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
    "remote reference": ({"$ref": "http://example.com/x"}, "$ref"),
    "anchor": ({"$ref": "#there", "$defs": {"p": {"$anchor": "there"}}}, "$ref"),
    "unknown format": ({"type": "string", "format": "isbn"}, "format"),
    "regex format": ({"type": "string", "format": "regex"}, "format"),
    "lookahead": ({"type": "string", "pattern": "^(?!a).*$"}, "pattern"),
    "word boundary": ({"type": "string", "pattern": "\\bx"}, "pattern"),
    "unknown keyword": (
        an_object(properties={"a": {"type": "string", "minLenght": 2}}),
        "properties.a.minLenght",
    ),
    "through a reference": (
        {"$ref": "#/$defs/p", "$defs": {"p": {"type": "array", "uniqueItems": True}}},
        "$defs.p.uniqueItems",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_enforced_is_refused_by_its_path(walker: Walker, name: str) -> None:
    schema, path = REFUSED[name]
    reasons = walker.reasons(schema)
    assert [reason for reason in reasons if reason.startswith(f"{path}: ")], reasons


def test_names_that_may_repeat_are_not_counted(walker: Walker) -> None:
    schema = an_object(additionalProperties=INTEGER, minProperties=2)
    (reason,) = walker.reasons(schema)
    assert reason.startswith("minProperties: not enforced where names are free")
    assert walker.takes_json(an_object(additionalProperties=INTEGER, minProperties=1), {"x": 1})


def test_llguidance_takes_no_escape_for_another_name(make_walker: type[Walker]) -> None:
    schema = an_object(properties={"a": INTEGER}, additionalProperties=TEXT)
    walker = make_walker("llguidance")
    assert walker.takes_json(schema, '{"a": 1, "b": "x"}')
    assert not walker.takes_json(schema, '{"a": 1, "\\u0061": "x"}')


XGRAMMAR_ALONE: dict[str, tuple[Any, str]] = {
    "pattern beside a length": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength"),
    "reference beside a length": (
        {"$defs": {"p": TEXT}, "$ref": "#/$defs/p", "maxLength": 2},
        "maxLength",
    ),
    "several allOf": ({"allOf": [INTEGER, {"minimum": 5}]}, "allOf"),
    "anyOf beside required": (an_object(required=["a"], anyOf=[{"required": ["b"]}]), "required"),
    "multiple of a fraction": ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    "enum beside a bound": ({"enum": [1, 5], "minimum": 3}, "minimum"),
}


@pytest.mark.parametrize("name", XGRAMMAR_ALONE)
def test_xgrammar_refuses_what_it_drops_beside_another_keyword(
    make_walker: type[Walker], name: str
) -> None:
    schema, path = XGRAMMAR_ALONE[name]
    reasons = make_walker("xgrammar").reasons(schema)
    assert [reason for reason in reasons if reason.startswith(f"{path}: ")], reasons


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": []}, "enum: got [], allowed: a list of at least one value"),
        (an_object(required="x"), "required: got 'x', allowed: a list of texts"),
        ({"type": "strin"}, "type: got 'strin', allowed: one or more of object"),
        ({"type": "string", "minLength": -1}, "minLength: got -1, allowed: a whole number"),
        ({"items": 5, "type": "array"}, "items: got 5, allowed: a schema"),
        ({"$ref": "#/$defs/nowhere"}, "$ref: nothing is at '#/$defs/nowhere'"),
        ({"type": "integer", "enum": ["a"]}, "enum: no value is left"),
    ],
)
def test_malformed_schema_is_an_error_that_says_where(
    walker: Walker, schema: Any, message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        walker.reasons(schema)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ('{"a": 1, "a": 2}', "has the key 'a' more than once"),
        ('{"const": NaN}', "holds NaN"),
        ('{"const": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 5000, "is nested 5000 deep"),
    ],
)
def test_text_that_is_no_json_is_an_error(walker: Walker, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        walker.backend.unsupported(GrammarSpec(kind="json", value=text))


def test_whitespace_is_bounded(make_walker: type[Walker], walker: Walker) -> None:
    schema = {"type": "array", "items": INTEGER}
    assert walker.takes_json(schema, "[1,  2]")
    assert not walker.takes_json(schema, "[1,   2]")
    compact = make_walker(walker.name, max_whitespace=0)
    assert compact.takes_json(schema, "[1,2]")
    assert not compact.takes_json(schema, "[1, 2]")


def test_properties_without_a_name_in_the_schema_are_an_option(
    make_walker: type[Walker], walker: Walker
) -> None:
    schema = an_object(properties={"a": INTEGER})
    for is_open in (True, False):
        chosen = make_walker(walker.name, additional_properties=is_open)
        assert chosen.takes_json(schema, {"a": 1})
        assert chosen.takes_json(schema, {"a": 1, "b": 2}) == is_open


def test_closing_objects_leaves_open_what_several_schemas_say_together(
    make_walker: type[Walker],
) -> None:
    part = an_object(properties={"a": INTEGER})
    other = an_object(properties={"b": {"$ref": "#/$defs/part"}}, required=["b"])
    schema = {"$defs": {"part": part, "alone": part}, "allOf": [{"$ref": "#/$defs/part"}, other]}
    inner = {"$ref": "#/$defs/alone"}
    whole = an_object(properties={"x": schema | {"$defs": {}}, "y": inner, "z": {"anyOf": [inner]}})
    walker = make_walker("llguidance", additional_properties=False)
    whole["$defs"] = schema["$defs"]
    assert walker.takes_json(whole, {"x": {"a": 1, "b": {"a": 2}}, "y": {"a": 3}, "z": {"a": 4}})
    assert not walker.takes_json(whole, {"x": {"b": {}}, "q": 1})
    assert not walker.takes_json(whole, {"y": {"q": 1}})
    assert not walker.takes_json(whole, {"z": {"q": 1}})
