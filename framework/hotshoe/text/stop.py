"""``StopChecker``: finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from hotshoe.errors import RequestError


class StopChecker:
    """Passes text on, except what may still turn out to be part of a stop string.

    The stop string that is complete first wins, and of several that end at the same character the
    longest; so the result doesn't depend on how the text was cut into pieces.

    Attributes:
        matched: the stop string found; None while there is none.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False) -> None:
        """Look for any of ``stop``.

        Args:
            include_stop_str: whether the stop string itself stays in the text.

        Raises:
            RequestError: if a stop string is empty.
        """
        if not all(stop):
            raise RequestError("stop: got an empty string, which every text contains; remove it")
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._held_back = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Take the next piece; return the text that is now safe to show.

        Once a stop string is found, that is what precedes it, and nothing ever after.
        """
        if self.matched is not None:
            return ""
        text = self._held_back + text
        if (match := self._find(text)) is not None:
            end, stop = match
            self.matched = stop
            self._held_back = ""
            return text[: end if self._include_stop_str else end - len(stop)]
        num_safe = len(text) - self._num_undecided(text)
        self._held_back = text[num_safe:]
        return text[:num_safe]

    def flush(self) -> str:
        """End the text; return what was held back."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where the winning stop string ends, and which it is."""
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), -len(stop), stop)
                found = candidate if found is None else min(found, candidate)
        return None if found is None else (found[0], found[2])

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of the text that a stop string starts with."""
        return max((_overlap(text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
