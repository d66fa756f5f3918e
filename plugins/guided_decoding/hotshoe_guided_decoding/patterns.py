"""Regular expressions as finite automata over bytes, for what most patterns are made of: literal
characters, classes, groups, alternatives and repetitions.

A pattern with anything else, also a malformed one, is the library's to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hotshoe_guided_decoding.automata import (
    Automaton,
    Network,
    NotHandledError,
    Piece,
    determined,
)

_MAX_COUNT = 1000
_MAX_DEPTH = 50
_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points from the first to the last, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a library takes the shorthands for; those that aren't named are left to it.

    Attributes:
        any_character: what ``.`` stands for.
        classes: code points by the letter behind the backslash, lower case.
    """

    any_character: Ranges
    classes: Mapping[str, Ranges]


def automaton(pattern: str, dialect: Dialect) -> Automaton | None:
    """The automaton of the texts that a pattern matches from the first to the last character; None
    if the pattern holds something that isn't understood here, or is too large, or matches nothing.
    """
    try:
        return determined(_Parser(pattern, dialect).parse())
    except NotHandledError:
        return None


class _Parser:
    """Recursive descent over a pattern."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        if pattern.startswith("^"):
            pattern = pattern[1:]
        if pattern.endswith("$") and not pattern.endswith("\\$"):
            pattern = pattern[:-1]
        self._pattern = pattern
        self._dialect = dialect
        self._at = 0
        self._depth = 0

    def parse(self) -> Piece:
        piece = self._alternatives()
        if self._at < len(self._pattern):
            raise NotHandledError
        return piece

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise NotHandledError
        self._at += 1
        return character

    def _alternatives(self) -> Piece:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self) -> Piece:
        pieces = []
        while self._peek() not in ("", "|", ")"):
            piece = self._atom()
            counts = self._counts()
            pieces.append(piece if counts is None else _repeated(piece, *counts))
        return _one_after_another(pieces)

    def _counts(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
        character = self._peek()
        if character in simple:
            self._at += 1
            counts = simple[character]
        elif character == "{":
            end = self._pattern.find("}", self._at)
            least, comma, most = self._pattern[self._at + 1 : end].partition(",")
            if end < 0 or not _is_count(least) or not (_is_count(most) or not most):
                raise NotHandledError
            self._at = end + 1
            counts = int(least), (int(most) if most else None) if comma else int(least)
        else:
            return None
        if self._peek() in ("?", "*", "+", "{") and self._peek():
            raise NotHandledError  # lazy, possessive, or an error
        if counts[1] is not None and counts[1] < counts[0]:
            raise NotHandledError
        return counts

    def _atom(self) -> Piece:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return _characters(self._class())
        if character == ".":
            return _characters(self._dialect.any_character)
        if character == "\\":
            return _characters(self._escape())
        if character in "^$*+?{}])":
            raise NotHandledError
        return _characters(((ord(character), ord(character)),))

    def _group(self) -> Piece:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotHandledError
        if self._peek() == "?":
            self._at += 1
            if self._take() != ":":
                raise NotHandledError
        piece = self._alternatives()
        if self._take() != ")":
            raise NotHandledError
        self._depth -= 1
        return piece

    def _escape(self) -> Ranges:
        character = self._take()
        controls = {"n": 10, "r": 13, "t": 9}
        if character in controls:
            return ((controls[character], controls[character]),)
        if character.lower() in self._dialect.classes:
            found = self._dialect.classes[character.lower()]
            return found if character.islower() else _complement(found)
        if character.isalnum() or not character.isascii() or character in "<>":
            raise NotHandledError
        return ((ord(character), ord(character)),)

    def _class(self) -> Ranges:
        is_negated = self._peek() == "^"
        self._at += is_negated
        found: list[tuple[int, int]] = []
        while (character := self._take()) != "]" or not found:
            # libraries differ on what these mean inside a class
            if character in "[]" or self._pattern.startswith(("&&", "--", "~~"), self._at - 1):
                raise NotHandledError
            is_escape = character == "\\"
            ranges = self._escape() if is_escape else ((ord(character), ord(character)),)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._take()
                if last in "[]" or len(ranges) > 1 or ranges[0][0] != ranges[0][1]:
                    raise NotHandledError
                ends = self._escape() if last == "\\" else ((ord(last), ord(last)),)
                if len(ends) > 1 or ends[0][0] != ends[0][1] or ends[0][0] < ranges[0][0]:
                    raise NotHandledError
                ranges = ((ranges[0][0], ends[0][0]),)
            found += ranges
        merged = _merged(found)
        return _complement(merged) if is_negated else merged


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4 and int(text) <= _MAX_COUNT


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for first, last in ranges:
        if first > start:
            found.append((start, first - 1))
        start = last + 1
    if start <= _LAST:
        found.append((start, _LAST))
    return tuple(found)


def _one_after_another(pieces: Sequence[Piece]) -> Piece:
    def write(network: Network, start: int) -> int:
        for piece in pieces:
            start = piece(network, start)
        return start

    return write


def _any_of(branches: Sequence[Piece]) -> Piece:
    def write(network: Network, start: int) -> int:
        end = network.add()
        for branch in branches:
            network.free[branch(network, start)].append(end)
        return end

    return write


def _repeated(piece: Piece, least: int, most: int | None) -> Piece:
    def write(network: Network, start: int) -> int:
        for _ in range(least):
            network.work()
            start = piece(network, start)
        if most is None:
            loop = network.add()
            network.free[start].append(loop)
            network.free[piece(network, loop)].append(loop)
            # not the loop itself: what follows may lead back to its own start
            end = network.add()
            network.free[loop].append(end)
            return end
        end = network.add()
        for _ in range(most - least):
            network.work()
            network.free[start].append(end)
            start = piece(network, start)
        network.free[start].append(end)
        return end

    return write


def _characters(ranges: Ranges) -> Piece:
    sequences = [one for first, last in ranges for one in _utf8(first, last)]
    if not sequences:
        raise NotHandledError

    def write(network: Network, start: int) -> int:
        end = network.add()
        before: dict[tuple[tuple[int, int], ...], int] = {(): end}  # by what is left
        for sequence in sequences:
            at, left = start, tuple(sequence)
            while left:
                following = before.get(left[1:])
                is_known = following is not None
                if following is None:
                    following = before[left[1:]] = network.add()
                network.edges[at].append((_bits(*left[0]), following))
                if is_known:
                    break
                at, left = following, left[1:]
        return end

    return write


def _bits(low: int, high: int) -> int:
    return (1 << high + 1) - (1 << low)


_SIZES = ((0x7F, 1), (0x7FF, 2), (0xD7FF, 3), (0xDFFF, 0), (0xFFFF, 3), (_LAST, 4))


def _utf8(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """Code points from first to last as sequences of ranges of bytes; half surrogates have none."""
    for limit, num_bytes in _SIZES:
        if first > last:
            return
        if first <= limit:
            if num_bytes:
                yield from _split(first, min(last, limit), num_bytes)
            first = limit + 1


def _split(first: int, last: int, num_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """The same for code points whose encodings are of one length."""
    for place in range(1, num_bytes):
        tail = (1 << 6 * place) - 1
        if first & ~tail != last & ~tail:
            if first & tail:
                yield from _split(first, first | tail, num_bytes)
                yield from _split((first | tail) + 1, last, num_bytes)
                return
            if last & tail != tail:
                yield from _split(first, (last & ~tail) - 1, num_bytes)
                yield from _split(last & ~tail, last, num_bytes)
                return
    yield list(zip(chr(first).encode(), chr(last).encode(), strict=True))
