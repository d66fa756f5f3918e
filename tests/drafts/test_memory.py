"""What a drafter leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from drafts.heads import write_eagle3, write_medusa
from hotshoe import LLM, SamplingParams
from hotshoe.testing.models import write_tiny_checkpoint


@pytest.mark.parametrize(
    ("name", "write"),
    [("eagle", write_eagle3), ("medusa", write_medusa), ("draft_model", write_tiny_checkpoint)],
)
def test_a_closed_engine_frees_its_drafter_without_the_garbage_collector(
    name: str, write: Callable[[Path], Path], tiny_path: Path, tmp_path: Path
) -> None:
    drafter = {"name": name, "options": {"model": str(write(tmp_path / "drafter"))}}
    settings = {"dtype": "float32", "max_model_len": 64, "spec_decode": drafter}
    with LLM(str(tiny_path), **settings) as llm:
        assert llm.components["spec_decode.quantization"].startswith("none")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
        proposers = [one for one in gc.get_objects() if type(one).__name__.endswith("Proposer")]
        (reference,) = [weakref.ref(one) for one in proposers if not isinstance(one, type)]
        del proposers
        gc.collect()
        gc.disable()
    del llm
    try:
        assert reference() is None
    finally:
        gc.enable()
