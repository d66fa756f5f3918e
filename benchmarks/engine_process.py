"""An engine in a process of its own, which only runs while it is measured."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotshoe.bench.machine import ForeignLoad, process_tree, tree_memory_mb

DRIVERS = Path(__file__).with_name("peers")
ENGINES = ("hotshoe", "vllm", "openvino", "llama_cpp", "transformers")


class EngineError(Exception):
    """An engine can't be used, or has died; the message says why."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, which weights: ``name:variant``, with ``+ngram`` for drafts.

    Attributes:
        name: one of ``ENGINES``.
    """

    name: str
    variant: str
    drafts: bool

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        """From the command line.

        Raises:
            ValueError: if it isn't one.
        """
        name, _, rest = text.partition(":")
        variant, plus, drafts = rest.partition("+")
        if name not in ENGINES or not variant or (plus and drafts != "ngram"):
            raise ValueError(
                f"got {text!r}, allowed: ENGINE:VARIANT or ENGINE:VARIANT+ngram with ENGINE of "
                f"{', '.join(ENGINES)}"
            )
        return cls(name, variant, bool(plus))

    def __str__(self) -> str:
        return f"{self.name}:{self.variant}" + ("+ngram" if self.drafts else "")

    def python(self, home: Path) -> Path:
        """The interpreter of its environment: hotshoe's is the running one."""
        return Path(sys.executable) if self.name == "hotshoe" else home / self.name / "bin/python"


class EngineProcess:
    """Started by ``start``, stopped (``SIGSTOP``) whenever nothing is measured.

    Threads that wait busily, as those of some engines do, would otherwise take the cores from the
    engine that is measured.

    Args:
        settings: for the driver, see ``Settings`` in ``peers/protocol.py``.
        log: file for what the engine prints.
    """

    def __init__(
        self, spec: EngineSpec, home: Path, settings: Mapping[str, Any], log: Path
    ) -> None:
        self.spec = spec
        self._python = spec.python(home)
        self._settings = {**settings, "variant": spec.variant, "drafts": spec.drafts}
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def start(self) -> tuple[dict[str, Any], float]:
        """Start it and wait for its first token.

        Returns:
            What it says about itself, and the seconds that took.

        Raises:
            EngineError: if it isn't installed, can't do what is wanted, or fails.
        """
        if not self._python.exists():
            raise EngineError(f"not installed: no {self._python}")
        driver = DRIVERS / f"run_{self.spec.name}.py"
        command = [str(self._python), str(driver), json.dumps(self._settings)]
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = str(self._settings["num_threads"])
        # set on some machines for other programs' sake; each engine is to choose for itself
        for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH"):
            environment.pop(name, None)
        self._answers = queue.Queue()
        started = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        threading.Thread(
            target=self._read, args=(self._process, self._answers), daemon=True
        ).start()
        answer = self._answer(timeout_s=600)
        seconds = time.perf_counter() - started
        if "unsupported" in answer:
            self.close()
            raise EngineError(answer["unsupported"])
        self._signal(signal.SIGSTOP)
        return answer["ready"], seconds

    def run(self, workload: str, at: int, max_tokens: int | None = None) -> dict[str, Any]:
        """Run one round of a workload.

        Args:
            at: index of the round.
            max_tokens: fewer tokens per request than the workload has, for warming up.

        Returns:
            Figures by part, and the share of the cores that other processes took meanwhile.

        Raises:
            EngineError: if it dies or doesn't answer.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        load = ForeignLoad(self._process.pid)
        request = {"workload": workload, "round": at, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer(timeout_s=600)
        share = load.share()
        self._signal(signal.SIGSTOP)
        return {
            "parts": answer["parts"],
            "foreign_cpu_share": None if share is None else round(share, 3),
        }

    def memory_mb(self) -> float:
        """Of the process and its children."""
        assert self._process is not None
        return tree_memory_mb(self._process.pid)

    def close(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        tree = process_tree(self._process.pid)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            for process_id in reversed(tree):
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        for process_id in process_tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process_id, number)

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put(None)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise EngineError(f"no answer in {timeout_s:.0f} s; see {self._log}") from None
        if line is None:
            lines = [one for one in self._log.read_text(errors="replace").splitlines() if one]
            self.close()
            raise EngineError(f"ended: {lines[-1] if lines else 'without a word'}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer
