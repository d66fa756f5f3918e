"""What a drafter leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from drafts.heads import write_eagle3, write_medusa
from hotshoe import LLM, SamplingParams
from hotshoe.api import Proposer
from hotshoe.testing.models import write_tiny_checkpoint


def proposers() -> list[Proposer]:
    """All that are alive."""
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Proposer)]


@pytest.mark.parametrize(
    ("name", "write"),
    [("eagle", write_eagle3), ("medusa", write_medusa), ("draft_model", write_tiny_checkpoint)],
)
def test_a_closed_engine_frees_its_drafter_without_the_garbage_collector(
    name: str, write: Callable[[Path], Path], tiny_path: Path, tmp_path: Path
) -> None:
    drafter = {"name": name, "options": {"model": str(write(tmp_path / "drafter"))}}
    settings = {"dtype": "float32", "max_model_len": 64, "spec_decode": drafter}
    before = set(map(id, proposers()))
    with LLM(str(tiny_path), **settings) as llm:
        assert llm.components["spec_decode.quantization"].startswith("none")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
        (reference,) = [weakref.ref(one) for one in proposers() if id(one) not in before]
        gc.collect()
        gc.disable()
    try:
        del llm
        assert reference() is None
    finally:
        gc.enable()
