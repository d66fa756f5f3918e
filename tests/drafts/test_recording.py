"""Drafts that are drawn are computed in recorded passes, as the most likely ones are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from drafts.heads import write_eagle3
from hotshoe import LLM, SamplingParams

LOGGER = "hotshoe.worker.draft_forwards"


def test_passes_of_an_eagle_head_are_recorded_for_drafts_that_are_drawn(
    tmp_path: Path, tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_eagle3(tmp_path / "head")
    spec_decode = {"name": "eagle", "adaptive": False, "options": {"model": str(head)}}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    with (
        caplog.at_level(logging.INFO, logger=LOGGER),
        LLM(str(tiny_path), kernels={"name": "cpu"}, spec_decode=spec_decode) as llm,
    ):
        (output,) = llm.generate([[1, 2, 3]], params)
    assert len(output.outputs[0].token_ids) == 40
    assert [one.message for one in caplog.records if one.name == LOGGER] == []
