"""A command in a pseudo-terminal, as a person has it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 120.0

# makes the terminal the controlling one, so that Ctrl-C becomes a signal, and runs the command;
# shells let what they run in the background ignore that signal, and it would be inherited
_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """Starts a command whose standard streams are a terminal; use as a context manager."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._fd, other = pty.openpty()
        termios.tcsetwinsize(other, (24, 100))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=other,
            stdout=other,
            stderr=other,
            env=env | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(other)
        self._unread = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Press keys; control characters act as they do in a terminal."""
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> str:
        """Wait until the output matches; returns it up to the end of the match."""
        ends_at = time.monotonic() + _TIMEOUT_S
        while True:
            text = self._unread.decode(errors="replace")
            found = re.search(pattern, text)
            if found:
                self._unread = text[found.end() :].encode()
                return text[: found.end()]
            if time.monotonic() > ends_at or not self._read():
                raise AssertionError(f"no {pattern!r} in {text!r}")

    def wait_until_asleep(self) -> None:
        """Wait until the command waits for a key: a signal that comes between the prompt and that
        moment is noticed at the next key only.
        """
        status = Path(f"/proc/{self._process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)

    def wait(self) -> int:
        """The exit code, once the command has ended."""
        while self._read():
            pass
        return self._process.wait(_TIMEOUT_S)

    def _read(self) -> bool:
        """Take what is there, waiting a second at most; False if the command has ended."""
        readable, _, _ = select.select([self._fd], [], [], 1.0)
        if not readable:
            return True
        try:
            data = os.read(self._fd, 4096)
        except OSError:
            return False  # Linux reports the other end's closing so
        self._unread += data
        return bool(data)
