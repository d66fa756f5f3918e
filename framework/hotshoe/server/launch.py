"""Starts the engine core's process; neither side outlives the other unnoticed."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from hotshoe.config import EngineConfig
from hotshoe.server.core_process import CoreSettings, socket_path


class CoreHandle:
    """A running core process and where it listens.

    Attributes:
        settings: addresses and key; what a further API server process needs to connect.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], settings: CoreSettings, folder: Path
    ) -> None:
        self.process = process
        self.settings = settings
        self._folder = folder

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        while self.process.poll() is None:
            await asyncio.sleep(0.05)
        return self.process.returncode

    def stop(self, timeout_s: float = 5.0) -> int:
        """Stop it, gently first; returns the exit code. Idempotent."""
        if self.is_alive:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return self.process.returncode


def start_core(config: EngineConfig) -> CoreHandle:
    """Start an engine core for a config; it is ready when it answers a ``Hello``.

    The sockets lie in a folder that only this user can enter, unless ``server.core_address`` names
    a TCP address.
    """
    folder = Path(tempfile.mkdtemp(prefix="hotshoe-"))
    base = config.server.core_address
    if base is None:
        addresses = (socket_path(folder, "input"), socket_path(folder, "output"))
    else:
        host, port = base.removeprefix("tcp://").rsplit(":", 1)
        addresses = (f"tcp://{host}:{port}", f"tcp://{host}:{int(port) + 1}")
    settings = CoreSettings(
        config=config.model_dump(mode="json"),
        input_address=addresses[0],
        output_address=addresses[1],
        key=secrets.token_hex(16),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "hotshoe.server.core_process"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # signals to the whole group would end it before it has drained
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    process.stdin.flush()
    return CoreHandle(process, settings, folder)
