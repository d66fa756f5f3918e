"""The llguidance backend behind its entry module: imports the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llguidance

from hotshoe.api import (
    CompiledGrammar,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    GuidedDecodingContext,
    RequestError,
)
from hotshoe_guided_decoding import json_schema, schema_rules, texts
from hotshoe_guided_decoding.closing import closed
from hotshoe_guided_decoding.forced import TextCutter
from hotshoe_guided_decoding.patterns import Dialect
from hotshoe_guided_decoding.tables import Vocabulary, tabled

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe_guided_decoding.llguidance import LlguidanceOptions

_CHARACTER = r"[^\"\\\x00-\x1F\x7F]"
# the library computes once which tokens are so many ordinary characters of a JSON text at most, and
# where all of them may come next, looks no further at them: the finer, the closer to the end of a
# text of limited length
_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(rf"{_CHARACTER}{{1,{length}}}" for length in (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)),
    rf"{_CHARACTER}+",
)
# digits, letters and blanks are those of all scripts, and the library's to know
_DIALECT = Dialect(any_character=((0, 9), (11, 0x10FFFF)), classes={})


class LlguidanceGrammar(Grammar):
    """One matcher of the library."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._stop_words = texts.bit_words(eos_token_ids)
        # the library takes a stop token without a trace, so it's counted here
        self._is_ended = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        if self.validate(token_ids) < len(token_ids):
            return False
        for token_id in token_ids:
            if token_id in self._eos_token_ids:
                self._is_ended = True
            else:
                self._matcher.consume_token(token_id)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        if self._is_ended:
            return 0
        ends = (at for at, token_id in enumerate(token_ids) if token_id in self._eos_token_ids)
        end = next(ends, len(token_ids))
        matcher = self._matcher
        num_allowed: int = matcher.validate_tokens(list(token_ids[:end]))
        if num_allowed < end or end == len(token_ids):
            return num_allowed
        if end:
            matcher.consume_tokens(list(token_ids[:end]))
        is_allowed = matcher.is_accepting()
        if end:
            matcher.rollback(end)
        return end + int(is_allowed)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        if self._is_ended:
            bitmask[row] = 0
            for word, bits in self._stop_words.items():
                bitmask[row, word] = bits
            return
        target = bitmask[row]
        self._matcher.unsafe_compute_mask_ptr(
            target.data_ptr(), target.numel() * target.element_size()
        )
        if self._matcher.is_error():
            # what follows the first line is about the library's inside
            raise RequestError(f"llguidance gave up: {self._matcher.get_error().splitlines()[0]}")

    @property
    def is_terminated(self) -> bool:
        return self._is_ended

    def forced_tokens(self, limit: int) -> list[int]:
        if self._is_ended:
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found[:limit]


class LlguidanceCompiled(CompiledGrammar):
    """A matcher at its start, copied for each request; copies share what it computed."""

    def __init__(self, start: llguidance.LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._start = start
        self._eos_token_ids = eos_token_ids

    def matcher(self) -> Grammar:
        return LlguidanceGrammar(self._start.deep_copy(), self._eos_token_ids)


class LlguidanceBackend(GuidedDecodingBackend):
    """Compiles with the library's own limits on time and size."""

    def __init__(self, options: LlguidanceOptions, context: GuidedDecodingContext) -> None:
        self._options = options
        self._eos_token_ids = frozenset(context.eos_token_ids)
        self._vocabulary = Vocabulary(context)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(context, self._vocabulary.cut)),
            n_vocab=context.vocab_size,
            eos_token=list(context.eos_token_ids),
            slices=list(_SLICES),
        )
        matcher = llguidance.LLMatcher
        self._grammar_of: dict[str, Callable[[str], str]] = {
            "json": self._json,
            "json_object": lambda value: self._json('{"type": "object"}'),
            "regex": matcher.grammar_from_regex,
            "choice": lambda value: matcher.grammar_from_lark(_choice_lark(value)),
            "grammar": matcher.grammar_from_lark,
        }

    def unsupported(self, spec: GrammarSpec) -> list[str]:
        if spec.kind not in self._grammar_of:
            known = ", ".join(self._grammar_of)
            return [f"{spec.kind} is not among {known}, which llguidance enforces"]
        if spec.kind == "json":
            return _enforceable(spec.value)[1]
        return texts.unsafe(spec)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind == "regex":
            found = tabled(spec.value, _DIALECT, self._vocabulary)
            if found is not None:
                return found
        try:
            grammar = self._grammar_of[spec.kind](spec.value)
        except ValueError as error:
            raise RequestError(str(error)) from error
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._tokenizer
        )
        if is_error or messages:
            raise RequestError("; ".join(messages))
        start = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if start.is_error():
            raise RequestError(start.get_error())
        return LlguidanceCompiled(start, self._eos_token_ids)

    def _json(self, value: str) -> str:
        width = self._options.max_whitespace
        schema = _enforceable(value)[0]
        if not self._options.additional_properties:
            schema = closed(schema)
        text = json.dumps(schema, ensure_ascii=False)
        # a name that is written with \\u would pass for another one; but a control character in
        # a constant can be written in no other way
        escapes = None if "\\u00" in text else 'bfnrt\\"'
        return llguidance.LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "whitespace_flexible": width > 0,
                "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{width}}}" if width else None,
                "lenient": False,
                "json_allowed_escapes": escapes,
            },
        )


def _enforceable(value: str) -> tuple[Any, list[str]]:
    return json_schema.enforceable(json_schema.parse(value), schema_rules.LLGUIDANCE)


class _Vocabulary:
    """The token table in the shape that the library asks for."""

    def __init__(self, context: GuidedDecodingContext, cut: TextCutter) -> None:
        self.eos_token_id = context.eos_token_ids[0] if context.eos_token_ids else None
        self.bos_token_id = None
        table = list(context.token_bytes[: context.vocab_size])
        table += [b""] * (context.vocab_size - len(table))
        self.special_token_ids = [token_id for token_id, text in enumerate(table) if not text]
        # the library tells special tokens by a first byte that no text has
        self.tokens = [text or b"\xff<%d>" % token_id for token_id, text in enumerate(table)]

        self._cut = cut

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that the grammar forces: as the model would write it. The library takes
        fewer for an answer.
        """
        return list(self._cut(text.encode() if isinstance(text, str) else text))


def _choice_lark(value: str) -> str:
    return "start: " + " | ".join(json.dumps(choice) for choice in texts.choices(value))
