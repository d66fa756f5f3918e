"""Strings that a JSON schema bounds hold what JSON allows in them, and nothing else."""

from __future__ import annotations

import json
from functools import cache

import pytest

from hotshoe.api import Grammar, GrammarSpec, GuidedDecodingBackend, GuidedDecodingContext
from hotshoe_guided_decoding import llguidance, xgrammar

EOS = 256
PLUGINS = {"xgrammar": xgrammar, "llguidance": llguidance}
SCHEMAS = {
    "bounded": {"type": "string", "minLength": 1, "maxLength": 8},
    "not bounded": {"type": "string"},
    "pattern": {"type": "string", "pattern": "^[^x]+$"},
    "additional": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 8}},
}


@cache
def backend(name: str) -> GuidedDecodingBackend:
    component = PLUGINS[name].hotshoe_component()
    token_bytes = [*(bytes([byte]) for byte in range(256)), b""]
    context = GuidedDecodingContext(vocab_size=257, token_bytes=token_bytes, eos_token_ids=(EOS,))
    built: GuidedDecodingBackend = component.factory(component.options(), context)
    return built


def matcher(name: str, kind: str, value: object) -> Grammar:
    spec = GrammarSpec(kind=kind, value=json.dumps(value))
    assert backend(name).unsupported(spec) == []
    return backend(name).compile(spec).matcher()


def takes(grammar: Grammar, text: bytes) -> bool:
    return grammar.validate(list(text)) == len(text)


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_control_characters_are_refused(name: str, schema: dict[str, object]) -> None:
    start = b'{"k":"a' if schema["type"] == "object" else b'"a'
    grammar = matcher(name, "json", schema)
    assert takes(grammar, start + 'é€😀"'.encode())
    for character in range(0x20):
        assert not takes(grammar, start + bytes([character]))


def test_control_characters_are_refused_inside_of_tags() -> None:
    tag = {"type": "tag", "begin": "<x>", "end": "</x>"}
    content = {"type": "json_schema", "json_schema": SCHEMAS["bounded"]}
    form = {"type": "triggered_tags", "triggers": ["<x"], "tags": [{**tag, "content": content}]}
    grammar = matcher("xgrammar", "structural_tag", {"type": "structural_tag", "format": form})
    assert takes(grammar, b'\x01 <x>"abc"</x> and <x>"d"</x>.')
    assert not takes(grammar, b'<x>"a\x01')


@pytest.mark.parametrize("name", PLUGINS)
def test_bounds_count_characters_and_not_bytes(name: str) -> None:
    grammar = matcher(name, "json", SCHEMAS["bounded"])
    assert takes(grammar, ('"' + "😀" * 8 + '"').encode())
    assert not takes(grammar, ('"' + "😀" * 9).encode())
    assert not takes(grammar, b'""')
