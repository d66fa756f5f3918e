"""The conformance suite of the guided-decoding contract. Subclass it, name your component, and
run it with pytest.

    class TestMyBackend(GuidedDecodingConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, cast

import pytest
import torch

from hotshoe.api import (
    CompiledGrammar,
    Component,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    GuidedDecodingContext,
    RequestError,
)

PIECES = (b"ab", b"ba", b"aa", b"true", b'{"', b'":', b"12", b"\xc3\xa9")
"""Tokens of several bytes, besides one token for each byte."""


class GuidedDecodingConformance:
    """What the core relies on. The tokenizer has a token per byte, some longer ones, two that end
    the output, a special one, and ids without a token.

    Attributes:
        options: under ``guided_decoding.options``.
        spec: a constraint that the backend enforces; ``sentences`` and ``wrong`` are about it.
        sentences: all texts that satisfy it, or some of them.
        wrong: texts that aren't even the start of one.
    """

    options: ClassVar[dict[str, Any]] = {}
    spec: ClassVar[GrammarSpec] = GrammarSpec(kind="choice", value='["ab", "abba", "aab"]')
    sentences: ClassVar[Sequence[bytes]] = (b"ab", b"abba", b"aab")
    wrong: ClassVar[Sequence[bytes]] = (b"b", b"abc", b"aba ")
    vocab_size: ClassVar[int] = 300

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def context(self) -> GuidedDecodingContext:
        """The tokenizer's facts."""
        texts = [*(bytes([byte]) for byte in range(256)), *PIECES, b"", b"", b""]
        first_eos = len(texts) - 3
        return GuidedDecodingContext(
            vocab_size=self.vocab_size,
            token_bytes=texts,
            eos_token_ids=(first_eos, first_eos + 1),
        )

    def backend(self) -> GuidedDecodingBackend:
        """A fresh backend."""
        component = self.component()
        built = component.factory(component.options(**self.options), self.context())
        return cast(GuidedDecodingBackend, built)

    def compiled(self) -> CompiledGrammar:
        """The constraint, compiled."""
        backend = self.backend()
        assert backend.unsupported(self.spec) == []
        return backend.compile(self.spec)

    def token_ids(self, text: bytes, numbers: random.Random | None = None) -> list[int]:
        """A text in tokens: bytes, or long tokens here and there."""
        ids, position = [], 0
        while position < len(text):
            fitting = [
                256 + index
                for index, piece in enumerate(PIECES)
                if text.startswith(piece, position)
            ]
            if numbers is None or not fitting or numbers.random() < 0.5:
                ids.append(text[position])
                position += 1
            else:
                ids.append(numbers.choice(fitting))
                position += len(PIECES[ids[-1] - 256])
        return ids

    def allowed(self, grammar: Grammar) -> set[int]:
        """Tokens of the next mask, after every bit was set."""
        bitmask = torch.full((3, -(-self.vocab_size // 32)), -1, dtype=torch.int32)
        grammar.fill_bitmask(bitmask, 1)
        assert (bitmask[[0, 2]] == -1).all()
        words = bitmask[1].tolist()
        return {
            token_id
            for token_id in range(self.vocab_size)
            if words[token_id // 32] >> token_id % 32 & 1
        }

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "guided_decoding/0"

    def test_every_sentence_is_accepted_however_it_is_cut_and_then_ends(self) -> None:
        compiled, numbers = self.compiled(), random.Random(0)
        eos = self.context().eos_token_ids
        for sentence in self.sentences:
            for end in eos:
                grammar = compiled.matcher()
                assert grammar.accept(self.token_ids(sentence, numbers))
                assert not grammar.is_terminated or self.allowed(grammar) == set(eos)
                if not grammar.is_terminated:
                    assert grammar.accept([end])
                assert grammar.is_terminated

    def test_nothing_but_stop_tokens_is_allowed_after_the_end(self) -> None:
        grammar = self.compiled().matcher()
        eos = self.context().eos_token_ids
        grammar.accept([*self.token_ids(self.sentences[0]), eos[0]])
        assert grammar.is_terminated
        assert self.allowed(grammar) == set(eos)

    def test_the_end_is_not_allowed_inside_a_sentence(self) -> None:
        grammar = self.compiled().matcher()
        eos = self.context().eos_token_ids
        assert not self.allowed(grammar) & set(eos)
        assert not grammar.accept([eos[0]])

    def test_what_is_no_sentence_is_not_accepted_and_changes_nothing(self) -> None:
        compiled = self.compiled()
        for text in self.wrong:
            grammar = compiled.matcher()
            before = self.allowed(grammar)
            assert not grammar.accept(self.token_ids(text))
            assert self.allowed(grammar) == before

    def test_mask_has_exactly_the_tokens_that_are_accepted(self) -> None:
        compiled = self.compiled()
        for sentence in self.sentences:
            ids = self.token_ids(sentence)
            for length in range(len(ids) + 1):
                grammar = compiled.matcher()
                assert grammar.accept(ids[:length])
                found = {one for one in range(self.vocab_size) if grammar.validate([one]) == 1}
                mask = self.allowed(grammar)
                # a backend may leave out spellings of what can only be written in one way
                assert mask <= found
                assert bool(mask) == bool(found)

    def test_validate_counts_what_could_be_accepted_and_changes_nothing(self) -> None:
        compiled = self.compiled()
        sentence = self.token_ids(self.sentences[0])
        grammar = compiled.matcher()
        before = self.allowed(grammar)
        assert grammar.validate([]) == 0
        assert grammar.validate(sentence) == len(sentence)
        stop = self.context().eos_token_ids[0]
        assert grammar.validate([*sentence, stop]) == len(sentence) + 1
        for text in self.wrong:
            assert grammar.validate(self.token_ids(text)) < len(text)
        assert self.allowed(grammar) == before

    def test_rollback_undoes_exactly_what_was_accepted(self) -> None:
        compiled = self.compiled()
        stop = self.context().eos_token_ids[0]
        for sentence in self.sentences:
            ids = [*self.token_ids(sentence), stop]
            grammar = compiled.matcher()
            masks = []
            for token_id in ids:
                if grammar.is_terminated:
                    break
                masks.append(self.allowed(grammar))
                assert grammar.accept([token_id])
            for length in range(len(masks) - 1, -1, -1):
                grammar.rollback(1)
                assert self.allowed(grammar) == masks[length]
            assert grammar.accept(ids[:2])
            grammar.rollback(2)
            grammar.rollback(0)
            assert self.allowed(grammar) == masks[0]

    def test_forced_tokens_come_before_anything_else_and_asking_changes_nothing(self) -> None:
        compiled, texts = self.compiled(), self.context().token_bytes
        stop = self.context().eos_token_ids[0]
        for sentence in self.sentences:
            ids = self.token_ids(sentence)
            for length in range(len(ids) + 1):
                grammar = compiled.matcher()
                assert grammar.accept(ids[:length])
                before = self.allowed(grammar)
                forced = grammar.forced_tokens(8)
                assert grammar.forced_tokens(1) == forced[:1]
                assert grammar.validate(forced) == len(forced) <= 8
                text = b"".join(texts[token_id] for token_id in forced)
                for token_id in before if forced else ():
                    other = texts[token_id]
                    assert text.startswith(other) or other.startswith(text)
                assert self.allowed(grammar) == before
            assert grammar.accept([stop])
            assert grammar.forced_tokens(8) == []

    def test_matchers_of_one_constraint_share_no_state(self) -> None:
        compiled = self.compiled()
        first, second = compiled.matcher(), compiled.matcher()
        before = self.allowed(second)
        first.accept(self.token_ids(self.sentences[0]))
        assert self.allowed(second) == before
        assert self.allowed(compiled.matcher()) == before

    def test_special_tokens_and_ids_without_a_token_are_never_allowed(self) -> None:
        grammar = self.compiled().matcher()
        num_tokens = len(self.context().token_bytes)
        without = {num_tokens - 1, *range(num_tokens, self.vocab_size)}
        assert not self.allowed(grammar) & without
        assert grammar.validate([num_tokens - 1]) == 0

    def test_masks_filled_together_equal_those_filled_alone(self) -> None:
        backend = self.backend()
        compiled = backend.compile(self.spec)
        stop = self.context().eos_token_ids[0]
        ids = self.token_ids(self.sentences[0])
        grammars = [compiled.matcher() for _ in range(3)]
        grammars[1].accept(ids[:1])
        grammars[2].accept([*ids, stop])
        shape = (5, -(-self.vocab_size // 32))
        together = torch.full(shape, -1, dtype=torch.int32)
        alone = torch.full(shape, -1, dtype=torch.int32)
        backend.fill_bitmasks(grammars, together, [4, 0, 2])
        for grammar, row in zip(grammars, [4, 0, 2], strict=True):
            grammar.fill_bitmask(alone, row)
        assert torch.equal(together, alone)

    def test_constraints_compile_in_several_threads_at_once(self) -> None:
        backend = self.backend()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(backend.compile, [self.spec] * 8))
        ids = self.token_ids(self.sentences[0])
        assert all(compiled.matcher().accept(ids) for compiled in found)

    def test_unknown_kind_is_a_reason_and_no_crash(self) -> None:
        (reason,) = self.backend().unsupported(GrammarSpec(kind="telepathy", value="x"))
        assert "telepathy" in reason

    @pytest.mark.parametrize("kind", ["json", "regex", "grammar", "structural_tag"])
    def test_malformed_constraint_is_refused_and_the_next_one_is_fine(self, kind: str) -> None:
        backend = self.backend()
        spec = GrammarSpec(kind=kind, value="([{")
        try:
            is_refused = bool(backend.unsupported(spec) or not backend.compile(spec))
        except RequestError:
            is_refused = True
        assert is_refused
        assert backend.compile(self.spec).matcher().accept(self.token_ids(self.sentences[0]))
