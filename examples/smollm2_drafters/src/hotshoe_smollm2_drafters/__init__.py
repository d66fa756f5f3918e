"""Draft heads for SmolLM2-135M-Instruct: ``EAGLE`` and ``MEDUSA`` are the folders they lie in."""

from pathlib import Path

EAGLE = Path(__file__).parent / "eagle"
"""An EAGLE-3 head, for ``spec_decode.options.model`` of the ``eagle`` drafter."""

MEDUSA = Path(__file__).parent / "medusa"
"""Four Medusa heads, for ``spec_decode.options.model`` of the ``medusa`` drafter."""
