"""The installed ``hotshoe`` command, as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("hotshoe"))
LETTER_IDS = tuple(range(ord("a"), ord("z") + 1))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def hotshoe(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        [COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
