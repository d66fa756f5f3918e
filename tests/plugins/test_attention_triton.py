"""Attention in Triton: its results in the interpreter, and that its kernels compile for GPUs."""

from __future__ import annotations

import pytest

from interpreted.run import run_interpreted


@pytest.mark.slow
def test_the_conformance_suite_passes_in_the_interpreter() -> None:
    run_interpreted("attention.py")
