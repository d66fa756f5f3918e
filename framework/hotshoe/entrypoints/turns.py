"""``Turns``: one caller at a time at an engine that several threads and streams share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hotshoe.errors import HotshoeError


class Turns:
    """A lock that may be left work for: whoever holds it does it before others may take it.

    So a stream can be given up at any moment, also by the garbage collector in the middle of a
    step, when nothing may be touched and nobody may wait.

    Args:
        clean_up: called, within a turn, with the request ids that were left behind.
    """

    def __init__(self, clean_up: Callable[[list[str]], None]) -> None:
        self._clean_up = clean_up
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._left_behind: deque[str] = deque()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait until nobody else is at the engine.

        Raises:
            HotshoeError: if this thread holds the turn: an observer or a plugin calls from inside a
                step.
        """
        if self._holder == threading.get_ident():
            raise HotshoeError(
                "the LLM was used from inside a step of its own, as by an observer or a plugin; "
                "do it between steps"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._finish_turn()
        self._settle()

    def close(self) -> None:
        """There is nothing to clean up any more. Called within a turn."""
        self._clean_up = lambda request_ids: None

    def leave_behind(self, request_ids: Iterable[str]) -> None:
        """Have requests cleaned up as soon as nobody is at the engine; never waits."""
        self._left_behind.extend(request_ids)
        self._settle()

    def _settle(self) -> None:
        # whoever holds the lock looks again after letting go of it, so that nothing is forgotten
        while self._left_behind and self._lock.acquire(blocking=False):
            try:
                self._holder = threading.get_ident()
                self._finish_turn()
            finally:
                self._lock.release()

    def _finish_turn(self) -> None:
        try:
            if self._left_behind:
                ids = [self._left_behind.popleft() for _ in range(len(self._left_behind))]
                self._clean_up(ids)
        finally:
            self._holder = None
