"""The system's C++ compiler: finding it, and running it on several files at once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotshoe_native.errors import CompileError, NativeError

_CANDIDATES = ("g++", "clang++")
_REMEDY = "install g++ (Debian, Ubuntu: apt install g++) for kernels that are several times faster"
_VERSION_TIMEOUT_S = 30.0
_POLL_S = 0.02
_TAIL_CHARS = 1500
_LEAST_FREE_BYTES = 4 * 1024**2
_NO_SPACE = "No space left on device"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that can be run.

    Attributes:
        command: the program's path, and arguments that always go first.
        version: the first line of what ``--version`` prints.
    """

    command: tuple[str, ...]
    version: str

    @property
    def label(self) -> str:
        """Name and version for messages, such as ``g++ 12.2.0``."""
        plain = re.sub(r"\(.*?\)", "", self.version)
        number = re.search(r"\d+(\.\d+)+", plain) or re.search(r"\d+(\.\d+)+", self.version)
        name = Path(self.command[-1]).name
        return f"{name} {number[0]}" if number else name


def find_compiler(environment: Mapping[str, str] | None = None) -> Compiler:
    """The compiler that ``$CXX`` names, otherwise g++ or clang++ on the ``PATH``.

    Build tools share that variable, and it's about the machine: it's no setting of the engine.

    Args:
        environment: None = that of the process.

    Raises:
        NativeError: if there is none.
    """
    variables = os.environ if environment is None else environment
    path = variables.get("PATH", os.defpath)
    if chosen := variables.get("CXX", "").strip():
        program, *arguments = shlex.split(chosen)
        found = shutil.which(program, path=path)
        if found is None:
            raise NativeError(
                f"the environment variable CXX is {chosen!r}, which is no program that can be run; "
                f"unset it or set it to a C++ compiler"
            )
        return Compiler((found, *arguments), _version([found, *arguments]))
    for candidate in _CANDIDATES:
        if found := shutil.which(candidate, path=path):
            return Compiler((found,), _version([found]))
    raise NativeError(f"no C++ compiler found; {_REMEDY}")


def _version(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the C++ compiler {command[0]!r} can't be run: {error}") from error
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else "unknown version"


def run_all(
    commands: Sequence[Sequence[str]], *, folder: Path, num_jobs: int, timeout_s: float
) -> None:
    """Run commands, so many at a time; after the first that fails none is started.

    Args:
        folder: for what they print, and for their temporary files.

    Raises:
        CompileError: with the command's last output.
        NativeError: if the disk is full.
        OSError: if a command can't be started.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(enumerate(commands))
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                index, command = waiting.pop(0)
                running[index] = _start(command, folder / f"{index}.txt", folder)
            time.sleep(_POLL_S)
            for index, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                if process.returncode != 0:
                    raise _failure(commands[index], process.returncode, folder / f"{index}.txt")
            if running and time.monotonic() > deadline:
                program = Path(commands[0][0]).name
                raise CompileError(
                    f"{program} did not finish within {timeout_s:g} s; "
                    f"free the machine's cores and memory, or set CXX to another compiler"
                )
    finally:
        for process in running.values():
            # no group of their own: what ends this process's group ends them, and nothing else
            process.terminate()
            process.wait()


def _start(command: Sequence[str], output_file: Path, folder: Path) -> subprocess.Popen[bytes]:
    with output_file.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
        )


def _failure(command: Sequence[str], code: int, output_file: Path) -> NativeError:
    printed = output_file.read_text(errors="replace").strip()
    free_bytes = shutil.disk_usage(output_file.parent).free
    # the compiler's words may be lost to a full disk too
    if _NO_SPACE in printed or free_bytes < _LEAST_FREE_BYTES:
        return NativeError(
            f"the native kernels can't be compiled in {output_file.parent.parent}: "
            f"{free_bytes // 1024} KiB are free there; free some more, or set XDG_CACHE_HOME to "
            f"another folder"
        )
    shown = printed if len(printed) <= _TAIL_CHARS else f"{printed[:_TAIL_CHARS]} ..."
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return CompileError(
        f"the C++ compiler failed ({how}); use g++ 10 or clang 12 at least, set CXX to choose "
        f"one; {shlex.join(command)} printed: {shown or 'nothing'}"
    )
