"""``DeferredInterrupt``: Ctrl-C never breaks into the middle of a step."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class DeferredInterrupt:
    """Holds Ctrl-C back until a block ends; pressed twice, it breaks in all the same.

    Blocks may be nested: the outermost takes the signal over and gives it back, which costs too
    much to be done for every step, and the end of each raises.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_installed = False
        self._num_presses = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._num_presses = 0
            # elsewhere it isn't delivered, or somebody has other plans with it
            self._is_installed = (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            )
            if self._is_installed:
                signal.signal(signal.SIGINT, self._handle)
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth and self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._num_presses and error is None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: Any) -> None:
        self._num_presses += 1
        if self._num_presses > 1:
            signal.default_int_handler(number, frame)
