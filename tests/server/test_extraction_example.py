"""The example of structured outputs over HTTP runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from server.command import start_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "extract_over_http.py"


@pytest.mark.slow
def test_the_extraction_example_fits_its_model_and_its_choices(tiny_path: Path) -> None:
    with start_server(str(tiny_path), "--max-model-len", "1024") as server:
        done = subprocess.run(
            [sys.executable, EXAMPLE, server.url],
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
        )
    assert done.returncode == 0, done.stderr
    crossing, colour = done.stdout.split("\n")[:-1]
    place = "(Harwich|Hook of Holland|Dover)"
    assert re.search(rf" \| {place} - {place} \| [1-9][0-9]? h$", crossing)
    assert colour in ("red", "green", "blue")
