"""Runs a file of tests in Triton's interpreter: in a process of its own, because Triton asks once,
when a kernel is defined, whether it shall be interpreted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TIMEOUT_S = 540


def run_interpreted(name: str, *, markers: str = "not gpu and not full") -> None:
    """Run the tests of a file of this folder that has no name of a test's, on the CPU; the test
    that calls this fails with what pytest has to say about each that failed.

    Args:
        name: of the file.
        markers: expression that selects some of its tests.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers]
    # NumPy, which the interpreter computes with, warns of every infinity
    command += ["-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [*command, str(FOLDER / name)],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode or not re.search(r"\b[1-9]\d* passed", done.stdout):
        pytest.fail(f"in Triton's interpreter:\n{done.stdout}", pytrace=False)
