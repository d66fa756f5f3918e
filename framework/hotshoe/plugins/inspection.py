"""Look inside a plugin, or prepare it, without importing it here: a subprocess does, and may crash
or hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotshoe.plugins.discovery import PluginInfo

_TAIL_CHARS = 2000
_STANDARD_ERROR = 2


def inspect_in_subprocess(info: PluginInfo, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Import one plugin in a subprocess and return what it says about itself, as plain data.

    Args:
        info: from ``discover`` or ``PluginRegistry.find``.
        timeout_s: after this the subprocess and its children are killed.

    Returns:
        Always ``status``, ``ok`` or ``error``. With ``error``, the text of it. With ``ok``,
        ``contract``, ``is_experimental``, ``doc``, ``options`` (a list of ``name``, ``type``,
        ``required``, ``default``, ``description``, ``allowed``), ``capabilities``,
        ``unsupported``, ``auto_priority``, ``prepares`` (whether it has heavy
        start-up work) and ``options_schema``.
    """
    with tempfile.TemporaryDirectory(prefix="hotshoe-probe-") as folder:
        result_file = Path(folder) / "result.json"
        output_file = Path(folder) / "output.txt"
        code = _run(info, result_file, output_file, timeout_s)
        if result_file.exists():
            result: dict[str, Any] = json.loads(result_file.read_text())
            return result
        tail = output_file.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    how = (
        f"did not finish within {timeout_s:g} s"
        if code is None
        else _describe_exit(code, "imported")
    )
    printed = f"; its last output:\n{tail}" if tail else ""
    return {"status": "error", "error": f"{info.label} {how}{printed}"}


def prepare_in_subprocess(info: PluginInfo, options: Mapping[str, Any]) -> list[str]:
    """Let one plugin do its heavy start-up work, which may take minutes; what it prints is seen.

    Args:
        info: from ``discover`` or ``PluginRegistry.find``.
        options: raw values of its options.

    Returns:
        Why it can't work here; empty = it's ready.
    """
    with tempfile.TemporaryDirectory(prefix="hotshoe-prepare-") as folder:
        result_file = Path(folder) / "result.json"
        fields = [info.kind, info.name, info.distribution, info.version, info.module]
        command = [sys.executable, "-P", "-m", "hotshoe.plugins.preparation", *fields]
        done = subprocess.run(
            [*command, json.dumps(dict(options)), str(result_file)],
            stdin=subprocess.DEVNULL,
            stdout=_STANDARD_ERROR,
            env={**os.environ, "PYTHONPATH": _search_path()},
            check=False,
        )
        if result_file.exists():
            reasons: list[str] = json.loads(result_file.read_text())
            return reasons
    return [f"{info.label} {_describe_exit(done.returncode, 'prepared')}"]


def _run(info: PluginInfo, result_file: Path, output_file: Path, timeout_s: float) -> int | None:
    """Exit code of the probe; None if it ran into the timeout."""
    fields = [info.kind, info.name, info.distribution, info.version, info.module]
    command = [sys.executable, "-P", "-m", "hotshoe.plugins.probe", *fields, str(result_file)]
    # files, not pipes: a grandchild that outlives the probe would keep a pipe open
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": _search_path()},
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _search_path() -> str:
    """The parent's ``sys.path``, so that both see the same distributions."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _describe_exit(code: int, what: str) -> str:
    if code < 0:
        return f"crashed while being {what}, signal {signal.Signals(-code).name}"
    return f"ended the process while being {what}, exit code {code}"
