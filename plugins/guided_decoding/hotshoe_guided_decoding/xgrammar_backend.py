"""The xgrammar backend behind its entry module: imports the library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xgrammar

from hotshoe.api import (
    CompiledGrammar,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    GuidedDecodingContext,
    RequestError,
)
from hotshoe_guided_decoding import json_schema, schema_rules, structural_tags, texts
from hotshoe_guided_decoding.forced import TextCutter
from hotshoe_guided_decoding.patterns import Dialect
from hotshoe_guided_decoding.tables import Vocabulary, tabled
from hotshoe_guided_decoding.unrolling import unrolled

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe_guided_decoding.xgrammar import XgrammarOptions

_BOUNDED_CHARACTER = r"_characters ::= (([^\"\\\r\n]))"
_JSON_CHARACTER = r"_characters ::= (([^\0-\x1f\"\\\r\n\uD800-\uDFFF]))"
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Check failed: \(.*?\) is false: )?")

_SPACES = ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
_DIALECT = Dialect(
    any_character=((0, 0x10FFFF),),
    classes={
        "d": ((48, 57),),
        "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
        "s": (*_SPACES, (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenFacts:
    """What matchers know of tokens.

    Attributes:
        stop_token_ids: that end an output.
        stop_words: words of a bitmask with nothing but those.
        without_text: special tokens, and ids that no token has.
        cut: cuts texts into tokens.
    """

    stop_token_ids: frozenset[int]
    stop_words: dict[int, int]
    without_text: frozenset[int]
    cut: TextCutter


class XgrammarGrammar(Grammar):
    """One matcher of the library.

    It ends with a stop token. The library then takes and allows no more, where the contract allows
    stop tokens on and on.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, facts: _TokenFacts) -> None:
        self.matcher = matcher
        self._facts = facts
        # only a stop token ends it, and to ask the library each time takes long
        self._is_ended = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        for count, token_id in enumerate(token_ids):
            if not self._accept(token_id):
                self.rollback(count)
                return False
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        num_allowed = 0
        for token_id in token_ids:
            if not self._accept(token_id):
                break
            num_allowed += 1
        self.rollback(num_allowed)
        return num_allowed

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._is_ended = False
            self.matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        if self._is_ended:
            bitmask[row] = 0
            for word, bits in self._facts.stop_words.items():
                bitmask[row, word] = bits
        else:
            self.matcher.fill_next_token_bitmask(bitmask, row)

    @property
    def is_terminated(self) -> bool:
        return self._is_ended

    def forced_tokens(self, limit: int) -> list[int]:
        text = "" if self._is_ended else self.matcher.find_jump_forward_string()
        # the last one may be the beginning of a longer one
        return list(self._facts.cut(text.encode())[:-1][:limit]) if text else []

    def _accept(self, token_id: int) -> bool:
        # the library logs a warning for each token without text that it's asked for
        if token_id in self._facts.without_text or self._is_ended:
            return False
        is_taken: bool = self.matcher.accept_token(token_id)
        if is_taken and token_id in self._facts.stop_token_ids:
            self._is_ended = True
        return is_taken


class XgrammarCompiled(CompiledGrammar):
    """What the library compiled; it shares it between matchers."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, facts: _TokenFacts) -> None:
        self._compiled = compiled
        self._facts = facts

    def matcher(self) -> Grammar:
        return XgrammarGrammar(xgrammar.GrammarMatcher(self._compiled), self._facts)


class XgrammarBackend(GuidedDecodingBackend):
    """Compiles through one compiler of the library, which is thread-safe."""

    def __init__(self, options: XgrammarOptions, context: GuidedDecodingContext) -> None:
        self._options = options
        vocabulary = list(context.token_bytes[: context.vocab_size])
        tokenizer = xgrammar.TokenizerInfo(
            vocabulary,
            # the table holds bytes as they appear in text, whatever the tokenizer's own alphabet
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=context.vocab_size,
            stop_token_ids=list(context.eos_token_ids),
        )
        # the core keeps what was compiled
        self._compiler = xgrammar.GrammarCompiler(
            tokenizer, max_threads=options.num_threads, cache_enabled=False
        )
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._vocabulary = Vocabulary(context)
        self._facts = _TokenFacts(
            stop_token_ids=frozenset(context.eos_token_ids),
            stop_words=texts.bit_words(context.eos_token_ids),
            cut=self._vocabulary.cut,
            without_text=frozenset(
                token_id
                for token_id in range(context.vocab_size)
                if token_id not in context.eos_token_ids
                and (token_id >= len(vocabulary) or not vocabulary[token_id])
            ),
        )
        self._compile: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json": self._json,
            "json_object": lambda value: self._json('{"type": "object"}', is_open=True),
            "regex": self._regex,
            "choice": lambda value: self._compiler.compile_grammar(texts.choice_ebnf(value)),
            "grammar": self._compiler.compile_grammar,
            "structural_tag": self._structural_tag,
        }

    def unsupported(self, spec: GrammarSpec) -> list[str]:
        if spec.kind not in self._compile:
            return [f"{spec.kind} is not among {', '.join(self._compile)}, which xgrammar enforces"]
        if spec.kind == "json":
            return _enforceable(json_schema.parse(spec.value))[1]
        if spec.kind == "structural_tag":
            return self._tag(spec.value)[1]
        return texts.unsafe(spec) or (_misread(spec.value) if spec.kind == "regex" else [])

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind == "regex":
            found = tabled(spec.value, _DIALECT, self._vocabulary)
            if found is not None:
                return found
        try:
            compiled = self._compile[spec.kind](spec.value)
        except RuntimeError as error:
            raise RequestError(_readable(error)) from error
        return XgrammarCompiled(compiled, self._facts)

    def fill_bitmasks(
        self, grammars: Sequence[Grammar], bitmask: Tensor, rows: Sequence[int]
    ) -> None:
        live: list[xgrammar.GrammarMatcher] = []
        live_rows: list[int] = []
        for grammar, row in zip(grammars, rows, strict=True):
            if isinstance(grammar, XgrammarGrammar) and not grammar.is_terminated:
                live.append(grammar.matcher)
                live_rows.append(row)
            else:
                grammar.fill_bitmask(bitmask, row)
        if live:
            self._batch.batch_fill_next_token_bitmask(live, bitmask, live_rows)

    def _json(self, value: str, *, is_open: bool = False) -> xgrammar.CompiledGrammar:
        schema, _ = _enforceable(json_schema.parse(value))
        width = self._options.max_whitespace
        grammar = xgrammar.Grammar.from_json_schema(
            json.dumps(schema),
            any_whitespace=width > 0,
            separators=(",", ":"),
            max_whitespace_cnt=width or None,
            strict_mode=not (is_open or self._options.additional_properties),
        )
        return self._compiler.compile_grammar(_without_control_characters(grammar))

    def _regex(self, value: str) -> xgrammar.CompiledGrammar:
        try:
            return self._compiler.compile_regex(unrolled(value))
        except RuntimeError:
            # for a message with the place in what the client wrote
            return self._compiler.compile_regex(value)

    def _structural_tag(self, value: str) -> xgrammar.CompiledGrammar:
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(self._tag(value)[0]))
        return self._compiler.compile_grammar(_without_control_characters(grammar))

    def _tag(self, value: str) -> tuple[Any, list[str]]:
        tag = json_schema.parse(value)
        return structural_tags.enforceable(tag, self._options.max_whitespace)


def _without_control_characters(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """Strings of bounded length in JSON without what the library forgets to forbid in them, and
    what makes the output no JSON.
    """
    text = str(grammar)
    if _BOUNDED_CHARACTER not in text:
        return grammar
    return xgrammar.Grammar.from_ebnf(text.replace(_BOUNDED_CHARACTER, _JSON_CHARACTER))


def _enforceable(schema: Any) -> tuple[Any, list[str]]:
    return json_schema.enforceable(schema, schema_rules.XGRAMMAR)


def _misread(pattern: str) -> list[str]:
    why = texts.misread(pattern)
    return [why] if why else []


def _readable(error: RuntimeError) -> str:
    """The library's message without the place in its source."""
    return _SOURCE_PLACE.sub("", str(error)).strip()
