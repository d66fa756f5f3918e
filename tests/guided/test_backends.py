"""The built-in backends: the conformance suite, each kind of constraint, what is refused."""

from __future__ import annotations

from typing import ClassVar

from hotshoe.api import Component, GrammarSpec
from hotshoe.testing.guided_decoding import GuidedDecodingConformance
from hotshoe_guided_decoding import llguidance, xgrammar


class TestXgrammar(GuidedDecodingConformance):
    def component(self) -> Component:
        return xgrammar.hotshoe_component()


class TestXgrammarRegex(TestXgrammar):
    spec: ClassVar = GrammarSpec(kind="regex", value="(ab)+é?")
    sentences: ClassVar = (b"ab", b"abab", "abé".encode())
    wrong: ClassVar = (b"b", b"aba ", "é".encode())


class TestXgrammarJson(TestXgrammar):
    spec: ClassVar = GrammarSpec(
        kind="json", value='{"type": "object", "properties": {"a": {"type": "boolean"}}}'
    )
    sentences: ClassVar = (b'{"a":true}', b'{ "a" : false }', b"{}")
    wrong: ClassVar = (b"[", b'{"b"', b'{"a":1')


class TestLlguidance(GuidedDecodingConformance):
    def component(self) -> Component:
        return llguidance.hotshoe_component()


class TestLlguidanceRegex(TestLlguidance):
    spec: ClassVar = TestXgrammarRegex.spec
    sentences: ClassVar = TestXgrammarRegex.sentences
    wrong: ClassVar = TestXgrammarRegex.wrong


class TestLlguidanceJson(TestLlguidance):
    spec: ClassVar = TestXgrammarJson.spec
    sentences: ClassVar = TestXgrammarJson.sentences
    wrong: ClassVar = (b"[", b'{"a":1')
