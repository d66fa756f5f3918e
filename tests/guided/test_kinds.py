"""Constraints that are no schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from guided.conftest import Walker
from hotshoe.api import GrammarSpec, RequestError
from hotshoe_guided_decoding.unrolling import unrolled


def test_any_json_object_is_an_object_and_nothing_else(walker: Walker) -> None:
    spec = GrammarSpec(kind="json_object")
    assert walker.takes(spec, '{"a": [1, {"b": null}], "c": "é"}')
    for text in ("[]", "1", '{"a"}', '{"a": 1,}', "{}x"):
        assert not walker.takes(spec, text), text


def test_regex_matches_the_whole_output(walker: Walker) -> None:
    spec = GrammarSpec(kind="regex", value=r"[a-z]{2,3}@(x|é)\.org")
    assert walker.takes(spec, "ab@x.org")
    assert walker.takes(spec, "abc@é.org")
    for text in ("a@x.org", "ab@xx.org", "ab@x.org ", "ab@xyorg"):
        assert not walker.takes(spec, text), text


@pytest.mark.parametrize(
    "text", ['a"b', "a\\b", "Zürich", "日本", "\U0001f600", "a\nb", "\t\x01 x"]
)
def test_choice_takes_any_text_literally(walker: Walker, text: str) -> None:
    spec = GrammarSpec(kind="choice", value=json.dumps([text, "other"]))
    assert walker.takes(spec, text)
    assert walker.takes(spec, "other")
    assert not walker.takes(spec, text[:-1])
    assert not walker.takes(spec, text + "x")


def test_grammar_is_ebnf_for_xgrammar_and_lark_for_llguidance(walker: Walker) -> None:
    grammars = {
        "xgrammar": 'root ::= "(" root ")" | [0-9]+',
        "llguidance": 'start: "(" start ")" | /[0-9]+/',
    }
    spec = GrammarSpec(kind="grammar", value=grammars[walker.name])
    assert walker.takes(spec, "((42))")
    assert not walker.takes(spec, "((42)")


def test_structural_tag_constrains_what_stands_inside_tags(make_walker: type[Walker]) -> None:
    walker = make_walker("xgrammar")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    tags = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    spec = GrammarSpec(
        kind="structural_tag", value=json.dumps({"type": "structural_tag", "format": tags})
    )
    assert walker.takes(spec, 'well: <f>{"a": 1}</f> done')
    assert not walker.takes(spec, 'well: <f>{"a": "x"}</f> done')


def test_what_a_constraint_leaves_no_choice_about_is_known(make_walker: type[Walker]) -> None:
    schema = json.dumps(SCHEMA | {"additionalProperties": False})
    for name in ("xgrammar", "llguidance"):
        backend = make_walker(name, max_whitespace=0).backend
        for spec, text in (
            (GrammarSpec(kind="json", value=schema), b'{"a":'),
            (GrammarSpec(kind="regex", value="no[ -]choice"), b"no"),
        ):
            forced = backend.compile(spec).matcher().forced_tokens(16)
            # the last byte may be the beginning of a longer token
            assert text[:-1] == bytes(forced)[: len(text) - 1]
            assert text.startswith(bytes(forced))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}


def tag_of(content: dict[str, Any]) -> GrammarSpec:
    form = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    return GrammarSpec(
        kind="structural_tag", value=json.dumps({"type": "structural_tag", "format": form})
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}},
            "json_schema.uniqueItems: not enforced by xgrammar",
        ),
        (
            {"type": "json_schema", "json_schema": SCHEMA, "any_order": True},
            "any_order: not enforced: required names could be missing or repeated",
        ),
        (
            {"type": "regex", "pattern": "a^b"},
            "pattern: ^ at position 1 is not enforced inside a pattern",
        ),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": "(" * 201}]},
            "elements[0].pattern: brackets are nested 201 deep, allowed: up to 200",
        ),
    ],
)
def test_what_can_t_be_enforced_in_a_structural_tag_has_its_path(
    make_walker: type[Walker], content: dict[str, Any], reason: str
) -> None:
    (found,) = make_walker("xgrammar").backend.unsupported(tag_of(content))
    assert found == f"format.content.{reason}"


@pytest.mark.parametrize(("max_whitespace", "most"), [(0, 1), (3, 3)])
def test_blanks_in_a_structural_tag_are_bounded_unless_it_says_how(
    make_walker: Callable[..., Walker], max_whitespace: int, most: int
) -> None:
    walker = make_walker("xgrammar", max_whitespace=max_whitespace)
    content = {"type": "json_schema", "json_schema": SCHEMA}
    older = GrammarSpec(kind="structural_tag", value=json.dumps(STRUCTURES))
    for spec in (tag_of(content), older):
        for blanks in range(6):
            text = '<f>{"a":' + " " * blanks + "1}</f>"
            assert walker.takes(spec, text) == (blanks <= most)
    own = tag_of(content | {"max_whitespace_cnt": 5})
    assert walker.takes(own, '<f>{"a":' + " " * 5 + "1}</f>")


def test_older_structural_tag_that_is_malformed_is_named(make_walker: type[Walker]) -> None:
    value = json.dumps(STRUCTURES | {"structures": [{"begin": "<f>"}]})
    spec = GrammarSpec(kind="structural_tag", value=value)
    with pytest.raises(RequestError, match=r"structures\[0\]: expected an object of begin, sch"):
        make_walker("xgrammar").backend.unsupported(spec)


def test_llguidance_refuses_structural_tags_by_name(make_walker: type[Walker]) -> None:
    walker = make_walker("llguidance")
    (reason,) = walker.backend.unsupported(GrammarSpec(kind="structural_tag", value="{}"))
    assert reason.startswith("structural_tag is not among json, ")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(a"),
        ("regex", "[a"),
        ("regex", "(?=a)b"),
        ("regex", r"(a)\1"),
        ("grammar", "root = nothing"),
        ("grammar", " "),
    ],
)
def test_malformed_text_is_an_error(walker: Walker, kind: str, value: str) -> None:
    spec = GrammarSpec(kind=kind, value=value)
    with pytest.raises(RequestError):
        walker.takes(spec, "a")


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("(ab|c){2,4}x", "(ab|c)(ab|c)((ab|c)((ab|c))?)?x"),
        (r"(a[)]{2}\)){2}", r"(a[)]{2}\))(a[)]{2}\))"),
        ("(a){2,}b{3}[()]{2}", "(a){2,}b{3}[()]{2}"),
        ("(a){2}?(b){0}", "(a){2}?(b){0}"),
        ("(abc){1,999}", "(abc){1,999}"),
        ("(a{2}", "(a{2}"),
    ],
)
def test_repeated_groups_are_written_out_where_that_is_short(pattern: str, written: str) -> None:
    assert unrolled(pattern) == written


def test_pattern_with_repeated_groups_means_the_same(walker: Walker) -> None:
    spec = GrammarSpec(kind="regex", value="([A-Z][a-z]{2,9} ){2}[0-9]{2}")
    assert walker.takes(spec, "Abc Defghijklm 12")
    for text in ("Abc 12", "Ab Def 12", "Abc Def Ghi 12", "Abc Def 1"):
        assert not walker.takes(spec, text), text
