"""The native kernels and attention in float32 equal transformers, whatever way requests are run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from golden.checks import check_greedy, check_sampled
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import VARIATIONS, Variation, each_variation
from golden.workloads import embedded_prompts, greedy_jobs, sampled_jobs, tiny_prompts
from hotshoe.text.tokenizer import load_tokenizer
from hotshoe.weights.checkpoint import open_checkpoint

REDUCED_PROMPTS = [0, 3, 20, 30, 46, 60]


def native(variation: Variation) -> Variation:
    """The same way to run requests, on the native parts."""
    parts = {"attention": "cpu", "kernels": "cpu", "sampler": "cpu"}
    return replace(variation, settings={**variation.settings, **parts})


@each_variation()
def test_tiny_greedy_output_equals_transformers(
    variation: Variation, tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    jobs = greedy_jobs(tiny_prompts(), 40)
    check_greedy(str(tiny_folder), tiny_oracle, native(variation), jobs, tally)


@each_variation()
def test_tiny_sampled_output_is_what_the_seeds_draw(
    variation: Variation, tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    jobs = sampled_jobs(tiny_prompts(), 40)
    check_sampled(str(tiny_folder), tiny_oracle, native(variation), jobs, tally)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything"])
def test_embedded_greedy_output_equals_transformers(
    name: str, embedded_oracle: Oracle, tally: Tally
) -> None:
    with open_checkpoint("embedded") as checkpoint:
        prompts = embedded_prompts(load_tokenizer(checkpoint))
    jobs = greedy_jobs([prompts[index] for index in REDUCED_PROMPTS], 24)
    check_greedy("embedded", embedded_oracle, native(VARIATIONS[name]), jobs, tally)
