"""``hotshoe serve`` as a process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cli.command import COMMAND, ENVIRONMENT


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server and where it listens."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def start_server(
    model: str, *flags: str, is_group: bool = False, environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[RunningServer]:
    """A server on a free port, ready; stopped at the end.

    Args:
        is_group: whether it leads a process group of its own, as a shell's jobs do.
    """
    command = [COMMAND, "serve", model, "--server.port", "0", "--dtype", "float32", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0 if is_group else None,
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            first = process.stdout.readline()
            url = re.search(r"https?://\S+", first)
            if url is None:
                raise RuntimeError(f"the server didn't start; it said {first!r}")
            yield RunningServer(url[0], process)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
