"""Constraints that are texts: choices as grammars, and what is too deep or too long to be safe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from hotshoe.api import GrammarSpec, RequestError

MAX_DEPTH = 200
"""Deepest nesting of brackets in a pattern or grammar."""


def choices(value: str) -> list[str]:
    """The texts of a ``choice`` constraint."""
    found: list[str] = json.loads(value)
    return found


def choice_ebnf(value: str) -> str:
    """A GBNF grammar of one of some texts."""
    return "root ::= " + " | ".join(_ebnf_literal(choice) for choice in choices(value))


def _ebnf_literal(text: str) -> str:
    pieces = []
    for character in text:
        if character in '"\\':
            pieces.append("\\" + character)
        elif character.isprintable():
            pieces.append(character)
        else:
            pieces.append(f"\\U{ord(character):08x}")
    return '"' + "".join(pieces) + '"'


def unsafe(spec: GrammarSpec) -> list[str]:
    """Why a constraint is not for a library to see.

    Raises:
        RequestError: if it's empty.
    """
    if spec.kind in ("regex", "grammar"):
        if not spec.value.strip():
            raise RequestError("is empty")
        depth = max_depth(spec.value)
        if depth > MAX_DEPTH:
            return [f"brackets are nested {depth} deep, allowed: up to {MAX_DEPTH}"]
    return []


def max_depth(text: str) -> int:
    """How deep brackets nest, quoted and escaped ones among them."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def bit_words(token_ids: Iterable[int]) -> dict[int, int]:
    """Bitmask words by index, as int32, with the bits of some tokens set."""
    words: dict[int, int] = {}
    for token_id in token_ids:
        word, bit = divmod(token_id, 32)
        words[word] = words.get(word, 0) | 1 << bit
    return {word: bits - 2**32 if bits >= 2**31 else bits for word, bits in words.items()}


_KNOWN_ESCAPE = re.compile(r"[^a-zA-Z0-9]|[dDwWsSnrtfv0]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[a-zA-Z]")


def misread(pattern: str) -> str:
    """Why xgrammar would take a pattern for another one, and only warn of it; empty = it doesn't.

    It takes an escape that it doesn't know for the character, and passes over anchors.
    """
    tokens = _tokens(pattern)
    for position, token in tokens:
        # what stands outside of classes may also be refused by the library, with its words for it
        is_known = _KNOWN_ESCAPE.match(token, 1) or token[1:] in tuple("bBkpP123456789")
        if token.startswith("\\") and not is_known:
            return f"{token[:2]} at position {position} is not enforced"
        if token.startswith("[") and (found := re.search(r"\[:\w+:\]", token)):
            return f"{found[0]} at position {position + found.start()} is not enforced"
        for escape in re.finditer(r"\\.?", token) if token.startswith("[") else ():
            if not _KNOWN_ESCAPE.match(token, escape.start() + 1) and escape[0] != "\\b":
                return f"{escape[0]} at position {position + escape.start()} is not enforced"
    for anchor, opening, closing, ordered in (
        ("^", "(", ")", tokens),
        ("$", ")", "(", tokens[::-1]),
    ):
        is_at_edge, outside = True, []
        for position, token in ordered:
            if token[0] == opening:
                outside.append(is_at_edge)
            elif token == "|":
                is_at_edge = outside[-1] if outside else True
            elif token == anchor and not is_at_edge:
                return f"{anchor} at position {position} is not enforced inside a pattern"
            elif token[0] == closing:
                is_at_edge = False
                del outside[-1:]
            elif token not in ("^", "$"):
                is_at_edge = False
    return ""


_TOKEN = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[a-zA-Z]|.)?|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(\?:|.",
    re.DOTALL,
)


def _tokens(pattern: str) -> list[tuple[int, str]]:
    """Escapes, classes, openings of groups and single characters, each with its position."""
    return [(found.start(), found[0]) for found in _TOKEN.finditer(pattern)]


_SAFE_ESCAPES = frozenset("dDwWsStnrfv.^$*+?()[]{}|/\\-\"'#@!%&=:;,<>~_`")


def against_pattern(pattern: str) -> str:
    """Why a pattern of a schema can't be trusted to a library; empty = it can.

    Libraries skip over syntax that they don't know here, which they refuse in a pattern alone.
    """
    depth = max_depth(pattern)
    if depth > MAX_DEPTH:
        return f"brackets are nested {depth} deep, allowed: up to {MAX_DEPTH}"
    position, is_in_class = 0, False
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            escaped = pattern[position + 1 : position + 2]
            is_code = re.match(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}", pattern[position + 1 :])
            if escaped not in _SAFE_ESCAPES and not is_code:
                return f"\\{escaped} at position {position} is not enforced"
            position += 1
        elif is_in_class:
            is_in_class = character != "]"
        elif character == "[":
            is_in_class = True
        elif character == "(" and pattern[position + 1 : position + 2] == "?":
            if pattern[position + 2 : position + 3] != ":":
                return f"(? at position {position} is not enforced, except as (?:"
        elif (character == "^" and position) or (character == "$" and position < len(pattern) - 1):
            return f"{character} at position {position} is not enforced inside a pattern"
        position += 1
    return ""
