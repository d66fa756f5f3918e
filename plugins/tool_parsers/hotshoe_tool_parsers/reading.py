"""Reading a text that is still growing, in code that looks as if all of it were there.

A reader is a generator: where it needs more text it yields, and goes on when some has come. What it
does therefore never depends on how the text was split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from hotshoe.api import ContentDelta, ToolCall, ToolCallDelta, ToolCallStream, ToolChoice, ToolDelta

Wait = Generator[None, None, Any]

_JSON_BARE = frozenset("0123456789+-.eEtrufalsn \t\r\n,:")
_SPACE = " \t\r\n"


class GrowingText(ToolCallStream):
    """The text so far, a place in it, and what has been told of it.

    Args:
        choice: what the request allows.
        read: the generator that reads it all.
    """

    def __init__(self, choice: ToolChoice, read: Callable[[GrowingText], Wait]) -> None:
        self.names = frozenset(tool.name for tool in choice.tools)
        self._num_calls = 0
        self._drops_space = False
        self._text = ""
        self._place = 0
        self._is_over = False
        self._space = ""
        self._told: list[ToolDelta] = []
        self._reading = read(self)
        self._go_on()

    def feed(self, text: str) -> list[ToolDelta]:
        self._text = self._text[self._place :] + text
        self._place = 0
        return self._go_on()

    def finish(self) -> list[ToolDelta]:
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[ToolDelta]:
        next(self._reading, None)
        told, self._told = self._told, []
        return told

    # -- reading --------------------------------------------------------------------------

    def more(self) -> Generator[None, None, bool]:
        """Whether there is a character at the place; waits for it."""
        while self._place >= len(self._text):
            if self._is_over:
                return False
            yield
        return True

    def take(self) -> str:
        """Take the character at the place, which is there."""
        self._place += 1
        return self._text[self._place - 1]

    def space(self) -> Generator[None, None, str]:
        """Take the spaces and line ends at the place."""
        taken = ""
        while (yield from self.more()) and self._text[self._place] in _SPACE:
            taken += self._text[self._place]
            self._place += 1
        return taken

    def word(self, word: str) -> Generator[None, None, bool]:
        """Take this word if it is at the place."""
        while len(self._text) - self._place < len(word):
            if self._is_over or not word.startswith(self._text[self._place :]):
                return False
            yield
        if not self._text.startswith(word, self._place):
            return False
        self._place += len(word)
        return True

    def content_until(self, marker: str) -> Generator[None, None, bool]:
        """Tell everything before the marker as content and take it; False if there is none."""
        while True:
            found = self._text.find(marker, self._place)
            if found >= 0:
                self.tell(self._text[self._place : found])
                self._place = found + len(marker)
                return True
            end = len(self._text) if self._is_over else self._safe_end(marker)
            self.tell(self._text[self._place : end])
            self._place = end
            if self._is_over:
                return False
            yield

    def _safe_end(self, marker: str) -> int:
        """Where the text could begin to be the marker."""
        start = max(self._place, len(self._text) - len(marker) + 1)
        for place in range(start, len(self._text)):
            if marker.startswith(self._text[place:]):
                return place
        return len(self._text)

    def json_object(self, taken: Callable[[str], None]) -> Generator[None, None, bool]:
        """Take a JSON object, piece by piece, up to its closing brace or to the first character
        that no JSON has there; False if it has no end.
        """
        depth, in_string, is_escaped = 0, False, False
        while (yield from self.more()):
            text, start = self._text, self._place
            for place in range(start, len(text)):
                character = text[place]
                if in_string:
                    if is_escaped:
                        is_escaped = False
                    elif character == "\\":
                        is_escaped = True
                    else:
                        in_string = character != '"'
                    continue
                if character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "]}":
                    depth -= 1
                elif character not in _JSON_BARE:
                    taken(text[start:place])
                    self._place = place
                    return False
                if depth == 0:
                    taken(text[start : place + 1])
                    self._place = place + 1
                    return True
            taken(text[start:])
            self._place = len(text)
        return False

    def content_to_end(self) -> Generator[None, None, None]:
        """Tell everything that still comes as content."""
        while (yield from self.more()):
            self.tell(self._text[self._place :])
            self._place = len(self._text)
        self.tell_space()

    def is_at(self, character: str) -> Generator[None, None, bool]:
        """Whether this character is at the place; doesn't take it."""
        return (yield from self.more()) and self._text[self._place] == character

    # -- telling --------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Tell of content. Spaces around calls belong to the format and are left out."""
        if self._drops_space:
            text = text.lstrip(_SPACE)
            if not text:
                return
            self._drops_space = False
        body = text.rstrip(_SPACE)
        if not body:
            self._space += text
            return
        self._told.append(ContentDelta(self._space + body))
        self._space = text[len(body) :]

    def tell_space(self) -> None:
        """At the end: spaces that no call followed are content after all."""
        if self._space:
            self._told.append(ContentDelta(self._space))
            self._space = ""

    def tell_call(self, name: str, arguments: str = "") -> None:
        """Tell of a call, or of its beginning."""
        self._told.append(ToolCallDelta(self._num_calls, name, arguments))
        self._num_calls += 1
        self._space = ""
        self._drops_space = True

    def tell_arguments(self, piece: str) -> None:
        """Tell more of the call that was begun last."""
        if piece:
            self._told.append(ToolCallDelta(self._num_calls - 1, None, piece))

    def call_of(self, text: str, key: str) -> tuple[str, str] | None:
        """Name and arguments of a call that is written as one JSON object; None if it isn't one."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        name, arguments = found.get("name"), found.get(key, {})
        if name not in self.names or not isinstance(arguments, dict):
            return None
        if set(found) - {"name", key, "id"}:
            return None
        return name, json_text(arguments)


def json_text(value: Any) -> str:
    """JSON as short as it is easy to read, and sure to be valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    # a model may write half of a surrogate pair as an escape
    return text if text.isascii() or _is_valid(text) else json.dumps(value)


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A call as one JSON object.

    Attributes:
        key: of the arguments.
        before: what a model that follows a constraint writes before the object.
    """

    key: str
    before: str = ""

    def begin(self, name: str) -> str:
        """All that stands before the arguments."""
        return f'{self.before}{{"name": "{name}", "{self.key}": '

    def write(self, call: ToolCall) -> str:
        """The whole call."""
        return f"{self.begin(call.name)}{call.arguments}}}"

    def read(self, text: GrowingText, is_constrained: bool) -> Generator[None, None, str | None]:
        """Tell of the call at the place: while it grows if it follows the constraint, else once it
        is whole. If it is none, return what was taken.
        """
        return self._read_constrained(text) if is_constrained else self._read_whole(text)

    def _read_constrained(self, text: GrowingText) -> Generator[None, None, str | None]:
        before, between = self.begin("\0").split("\0")
        if not (yield from text.word(before)):
            return ""
        for name in sorted(text.names):
            if (yield from text.word(name + between)):
                text.tell_call(name)
                yield from text.json_object(text.tell_arguments)
                yield from text.word("}")
                return None
        return before

    def _read_whole(self, text: GrowingText) -> Generator[None, None, str | None]:
        space = yield from text.space()
        if not (yield from text.is_at("{")):
            return space
        pieces: list[str] = []
        is_whole = yield from text.json_object(pieces.append)
        written = "".join(pieces)
        call = text.call_of(written, self.key) if is_whole else None
        if call is None:
            return space + written
        text.tell_call(*call)
        return None
