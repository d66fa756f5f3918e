"""Profiles of the step loop, on demand."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from hotshoe.errors import RequestError

KINDS = ("torch", "cprofile")


class Profiler:
    """At most one profile at a time, of the thread that starts it.

    Args:
        folder: where profiles are written; None: the folder for temporary files.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._running: tuple[str, Path, Any] | None = None

    def start(self, kind: str = "torch") -> str:
        """Begin.

        Args:
            kind: ``torch``: operators, as a Chrome trace; ``cprofile``: Python functions, for
                ``pstats``.

        Returns:
            The file that ``stop`` will write.

        Raises:
            RequestError: if one runs already, or the kind is unknown.
        """
        if kind not in KINDS:
            raise RequestError(
                f"no kind of profile {kind!r}; allowed: {', '.join(KINDS)}", field="kind"
            )
        if self._running is not None:
            raise RequestError(
                f"a profile is being taken already, to {str(self._running[1])!r}; stop it first"
            )
        folder = Path(self._folder or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "json" if kind == "torch" else "pstats"
        # of its own folder, so that nobody can have put a link in its place
        own = Path(
            tempfile.mkdtemp(prefix=time.strftime("hotshoe-profile-%Y%m%d-%H%M%S-"), dir=folder)
        )
        path = own / f"steps.{suffix}"
        profile = _torch_profile() if kind == "torch" else _python_profile()
        self._running = (kind, path, profile)
        return str(path)

    def stop(self) -> str:
        """End, and write the file; returns where it is.

        Raises:
            RequestError: if none runs.
        """
        if self._running is None:
            raise RequestError("no profile is being taken; start one first")
        (kind, path, profile), self._running = self._running, None
        if kind == "torch":
            profile.stop()
            profile.export_chrome_trace(str(path))
        else:
            profile.disable()
            profile.dump_stats(str(path))
        return str(path)


def _torch_profile() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    running = profile(activities=activities)
    running.start()
    return running


def _python_profile() -> Any:
    import cProfile

    running = cProfile.Profile()
    running.enable()
    return running
