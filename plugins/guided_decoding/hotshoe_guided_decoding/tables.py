"""Matchers that look up everything: automata whose masks are computed once per state and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe.api import CompiledGrammar, Grammar, GuidedDecodingContext
from hotshoe_guided_decoding.automata import Automaton
from hotshoe_guided_decoding.forced import TextCutter
from hotshoe_guided_decoding.patterns import Dialect, automaton

if TYPE_CHECKING:
    from torch import Tensor

_MAX_FORCED_BYTES = 256
_MAX_MASK_BYTES = 64 * 2**20  # of all masks that are kept


def tabled(pattern: str, dialect: Dialect, vocabulary: Vocabulary) -> CompiledGrammar | None:
    """A pattern made ready, if it's one for an automaton of moderate size."""
    found = automaton(pattern, dialect)
    return None if found is None else TableCompiled(found, vocabulary)


class Vocabulary:
    """The tokens, arranged so that all of them walk through an automaton at once."""

    def __init__(self, context: GuidedDecodingContext) -> None:
        texts = list(context.token_bytes[: context.vocab_size])
        self.texts = texts + [b""] * (context.vocab_size - len(texts))
        self.eos_token_ids = frozenset(context.eos_token_ids)
        self._num_words = -(-context.vocab_size // 32)
        ordered = sorted(
            (token_id for token_id, text in enumerate(self.texts) if text),
            key=lambda token_id: -len(self.texts[token_id]),
        )
        self._token_ids = np.array(ordered, np.int64)
        lengths = np.array([len(self.texts[token_id]) for token_id in ordered])
        data = np.frombuffer(b"".join(self.texts[one] for one in ordered), np.uint8)
        starts = np.cumsum(lengths) - lengths
        # byte i of each token that has one: those are the first ones, as the longest come first
        self._columns = [
            data[starts[: int((lengths > place).sum())] + place].astype(np.int32)
            for place in range(int(lengths.max(initial=0)))
        ]
        self.cut = TextCutter(context)
        self._masks: dict[tuple[Automaton, int], Tensor] = {}

    def mask(self, automaton: Automaton, state: int) -> Tensor:
        """``[ceil(vocab_size / 32)]`` int32: the tokens that lead from a state to a live one, and
        stop tokens where the text may end. Not to be changed.
        """
        key = (automaton, state)
        found = self._masks.get(key)
        if found is None:
            if (len(self._masks) + 1) * 4 * self._num_words > _MAX_MASK_BYTES:
                self._masks.clear()
            found = self._masks[key] = self._computed(automaton, state)
        return found

    def end_mask(self) -> Tensor:
        """Nothing but stop tokens."""
        return self._packed(np.zeros(0, np.int64), is_end=True)

    def _computed(self, automaton: Automaton, state: int) -> Tensor:
        flat, dead = automaton.transitions.ravel(), len(automaton.is_final) - 1
        if not self._columns:
            return self._packed(self._token_ids, is_end=bool(automaton.is_final[state]))
        first = automaton.transitions[state]
        places = np.flatnonzero((first != dead)[self._columns[0]])
        states = first[self._columns[0][places]].astype(np.int32)
        taken = []
        for column in self._columns[1:]:
            num_longer = int(np.searchsorted(places, len(column)))
            taken.append(places[num_longer:])  # at their end, and alive
            places = places[:num_longer]
            states = flat[states[:num_longer] * 256 + column[places]].astype(np.int32)
            is_alive = states != dead
            places, states = places[is_alive], states[is_alive]
        taken.append(places)
        token_ids = self._token_ids[np.concatenate(taken)]
        return self._packed(token_ids, is_end=bool(automaton.is_final[state]))

    def _packed(self, token_ids: NDArray[np.int64], *, is_end: bool) -> Tensor:
        is_allowed = np.zeros(32 * self._num_words, np.bool_)
        is_allowed[token_ids] = True
        for token_id in self.eos_token_ids:
            is_allowed[token_id] = is_end
        return torch.from_numpy(np.packbits(is_allowed, bitorder="little").view(np.int32))


class TableGrammar(Grammar):
    """A position in an automaton, with the way that led there."""

    def __init__(self, compiled: TableCompiled) -> None:
        self._compiled = compiled
        self._states = [0]
        self._is_ended = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        num_allowed = self._walk(token_ids)
        if num_allowed < len(token_ids):
            self.rollback(num_allowed)
            return False
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        num_allowed = self._walk(token_ids)
        self.rollback(num_allowed)
        return num_allowed

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._is_ended = False
            del self._states[-num_tokens:]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        compiled = self._compiled
        if self._is_ended:
            bitmask[row] = compiled.vocabulary.end_mask()
        else:
            bitmask[row] = compiled.vocabulary.mask(compiled.automaton, self._states[-1])

    @property
    def is_terminated(self) -> bool:
        return self._is_ended

    def forced_tokens(self, limit: int) -> list[int]:
        return [] if self._is_ended else self._compiled.forced_tokens(self._states[-1])[:limit]

    def _walk(self, token_ids: Sequence[int]) -> int:
        """Go as far as the tokens are allowed; how many were."""
        compiled, states = self._compiled, self._states
        vocabulary, table, dead = compiled.vocabulary, compiled.table, compiled.dead
        for count, token_id in enumerate(token_ids):
            state = states[-1]
            if self._is_ended:
                return count
            if token_id in vocabulary.eos_token_ids:
                if not compiled.automaton.is_final[state]:
                    return count
                self._is_ended = True
            else:
                text = vocabulary.texts[token_id]
                for byte in text:
                    state = table[state * 256 + byte]
                if state == dead or not text:
                    return count
            states.append(state)
        return len(token_ids)


class TableCompiled(CompiledGrammar):
    """An automaton and the vocabulary that its masks are kept with."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        # numbers of a memoryview are read much faster than those of an array
        self.table = memoryview(automaton.transitions.tobytes()).cast("h")
        self.dead = len(automaton.is_final) - 1
        self._forced: dict[int, list[int]] = {}

    def forced_tokens(self, state: int) -> list[int]:
        """Tokens of the only way on from a state; not to be changed."""
        found = self._forced.get(state)
        if found is None:
            # the last one may be the beginning of a longer one
            text = self._forced_text(state)
            found = self._forced[state] = list(self.vocabulary.cut(text)[:-1]) if text else []
        return found

    def _forced_text(self, state: int) -> bytes:
        text = bytearray()
        while len(text) < _MAX_FORCED_BYTES and not self.automaton.is_final[state]:
            ways = np.flatnonzero(self.automaton.transitions[state] != self.dead)
            if len(ways) != 1:
                break
            text.append(int(ways[0]))
            state = int(self.automaton.transitions[state, ways[0]])
        return bytes(text)

    def matcher(self) -> Grammar:
        return TableGrammar(self)
