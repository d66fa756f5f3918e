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
from hotshoe import LLM, SamplingParams
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


@pytest.mark.slow
def test_int8_pages_seldom_change_what_the_embedded_model_finds_most_likely() -> None:
    parts = {"attention": "cpu", "kernels": "cpu", "dtype": "float32", "max_model_len": 256}
    with LLM("embedded", **parts) as llm:
        prompts = embedded_prompts(llm.tokenizer)[::6]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
        texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]
        expected = most_likely(llm, texts)
    with LLM("embedded", **parts, cache={"dtype": "int8"}) as llm:
        found = most_likely(llm, texts)
    pairs = [pair for each in zip(expected, found, strict=True) for pair in zip(*each, strict=True)]
    share = sum(one == other for one, other in pairs) / len(pairs)
    assert 0.96 < share < 1, len(pairs)


def most_likely(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    """After each position of given texts but the last."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scored = [one.prompt_logprobs for one in llm.generate(texts, params)]
    return [
        [entry.top[0].token_id for entry in entries if entry is not None]
        for entries in scored
        if entries is not None
    ]
