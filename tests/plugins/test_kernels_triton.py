"""The Triton kernels: the conformance suite in the interpreter."""

from __future__ import annotations

from interpreted.run import run_interpreted


def test_kernels_conform_in_the_interpreter() -> None:
    run_interpreted("kernels.py")
