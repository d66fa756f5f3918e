"""Regular expressions with repeated groups written out, which the xgrammar library matches far
faster: it looks through a repetition of a group anew at each token.
"""

from __future__ import annotations

import re

MAX_LENGTH = 1500
"""Longest pattern that is made; compiling takes a time that grows with it."""

_COUNTS = re.compile(r"\{(\d{1,3})(,(\d{1,3})?)?\}")


def unrolled(pattern: str) -> str:
    """The same language with ``(group){2,4}`` as ``(group)(group)((group)(group)?)?``, as long as
    the result is short; otherwise the pattern as it is.
    """
    if "(" not in pattern or "{" not in pattern:
        return pattern
    position, written = 0, ""
    while position < len(pattern):
        length = _atom_length(pattern, position)
        if length is None:
            return pattern  # nothing that a library takes
        atom = pattern[position : position + length]
        position += length
        counts = _COUNTS.match(pattern, position) if atom.startswith("(") else None
        if counts is None:
            written += atom
            continue
        position = counts.end()
        repeated = _repeated(atom, counts)
        if repeated is None or pattern[position : position + 1] in ("?", "+", "*", "{"):
            written += atom + counts[0]
        else:
            written += repeated
    return written if len(written) <= MAX_LENGTH else pattern


def _repeated(group: str, counts: re.Match[str]) -> str | None:
    """A group so many times; None if that isn't worth it."""
    least = int(counts[1])
    most = least if counts[2] is None else int(counts[3] or 0)
    if (counts[2] and not counts[3]) or not most > 0 or least > most:
        return None
    if len(group) * most > MAX_LENGTH:
        return None
    optional = ""
    for _ in range(most - least):
        optional = f"({group}{optional})?"
    return group * least + optional


def _atom_length(pattern: str, start: int) -> int | None:
    """How long the character, class, escape or group at a position is; None if it has no end."""
    depth, position, is_in_class = 0, start, False
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character == "\\":
            position += 1
        elif is_in_class:
            is_in_class = character != "]"
        elif character == "[":
            is_in_class = True
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        if depth == 0 and not is_in_class:
            return position - start
    return None
