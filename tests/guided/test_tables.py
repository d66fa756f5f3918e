"""Patterns that are matched by tables: the same language as the libraries', and no other."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from guided.conftest import Walker
from hotshoe.api import GrammarSpec
from hotshoe_guided_decoding.automata import Automaton
from hotshoe_guided_decoding.patterns import Dialect, automaton

DIALECT = Dialect(any_character=((0, 0x10FFFF),), classes={"d": ((48, 57),)})
LETTERS = "ab-0é\U0001f600"


def matches(built: Automaton, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = int(built.transitions[state, byte])
    return bool(built.is_final[state])


PATTERNS = (
    "a",
    "^a|b$",
    "(?:a|b)*a",
    "a?b+|",
    "[^a]",
    "[a-]{2}b{0,2}",
    "(a|ab)(b|)",
    ".{2,3}",
    "\\d\\-[é-\U0001f600]*",
    "((a{2}|b)+-){1,2}",
    "(a*b*)*",
    "(a|b)*a(a|b){3}",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_automaton_matches_what_the_pattern_does(pattern: str) -> None:
    built = automaton(pattern, DIALECT)
    assert built is not None
    wanted = re.compile(pattern, re.DOTALL | re.ASCII)
    for length in range(5):
        for letters in product(LETTERS, repeat=length):
            text = "".join(letters)
            assert matches(built, text) == bool(wanted.fullmatch(text)), text


@pytest.mark.parametrize(
    "pattern",
    ["(", "a**", "a+?", "a{2,1}", "a{1001}", "{", "[]", "[[a]", "[a", r"\b", r"\w", "(?=a)", "a^b"],
)
def test_what_is_malformed_or_unusual_is_left_to_the_library(pattern: str) -> None:
    assert automaton(pattern, DIALECT) is None


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){20}", "((abc|de){1,1000}){1,1000}", "((){1000}){1000}", "(" * 9000]
)
def test_what_would_take_long_is_given_up(pattern: str) -> None:
    assert automaton(pattern, DIALECT) is None


def test_every_character_leads_to_the_classes_that_hold_it() -> None:
    numbers = random.Random(0)
    built = automaton("[\u0080-\u07ff]|[\u0fff-\uffff]|[^\0-\U0010fffe]", DIALECT)
    assert built is not None
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFE, 0xFFF, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    for point in [*edges, *(numbers.randrange(0xE000, 0x110000) for _ in range(200))]:
        wanted = 0x80 <= point <= 0x7FF or 0xFFF <= point <= 0xFFFF or point == 0x10FFFF
        assert matches(built, chr(point)) == wanted, hex(point)


SHARED = ("[^a]", ".", r"\.\-\/", "[a-]", "[^-a]+", "a|", "()", "a{3,}", "é?[à-ü]", "x{0}y")


@pytest.mark.parametrize("pattern", SHARED)
def test_a_pattern_means_the_same_in_a_table_and_in_the_library(
    walker: Walker, pattern: str
) -> None:
    # \x2d is a hyphen that only the library reads
    by_table = walker.backend.compile(GrammarSpec(kind="regex", value=pattern))
    by_library = walker.backend.compile(GrammarSpec(kind="regex", value=rf"(?:{pattern})\x2d"))
    assert type(by_table) is not type(by_library)
    characters = ["a", "b", ".", "-", "/", "\n", "\r", "\0", "é", "Ü", "\ud7ff", "\U0010ffff", "y"]
    for text in [*characters, *map("".join, product("aby-é", repeat=3)), "", ".-/", "aaaaaa"]:
        in_table = by_table.matcher().accept([*text.encode(), 256])
        assert in_table == by_library.matcher().accept([*text.encode(), 45, 256]), repr(text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a^b", "^ at position 1 is not enforced inside a pattern"),
        ("(a$)b", "$ at position 2 is not enforced inside a pattern"),
        ("(a|b^)", "^ at position 4 is not enforced inside a pattern"),
        (r"\Aab\Z", r"\A at position 0 is not enforced"),
        (r"a[\p{L}]", r"\p at position 2 is not enforced"),
        (r"\x{41}", r"\x at position 0 is not enforced"),
        ("[[:alpha:]]", "[:alpha:] at position 1 is not enforced"),
    ],
)
def test_what_xgrammar_would_read_as_something_else_is_refused(
    make_walker: type[Walker], pattern: str, reason: str
) -> None:
    walker = make_walker("xgrammar")
    assert walker.backend.unsupported(GrammarSpec(kind="regex", value=pattern)) == [reason]


@pytest.mark.parametrize("pattern", ["^a$|^b$", "(^(?:a|b)$)", r"^\x61|[\b]|b$", "(?:a|^b)"])
def test_anchors_at_the_edges_are_taken(make_walker: type[Walker], pattern: str) -> None:
    walker = make_walker("xgrammar")
    spec = GrammarSpec(kind="regex", value=pattern)
    assert walker.takes(spec, "a")
    assert walker.takes(spec, "b")
    assert not walker.takes(spec, "ab")
