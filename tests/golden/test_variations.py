"""No way to run requests changes a token: everything equals transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.checks import check_greedy, check_sampled
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import VARIATIONS, Variation, each_variation
from golden.workloads import embedded_prompts, greedy_jobs, sampled_jobs, tiny_prompts
from hotshoe.text.tokenizer import load_tokenizer
from hotshoe.weights.checkpoint import open_checkpoint

REDUCED = ["no_prefix_cache", "everything"]
REDUCED_PROMPTS = [0, 3, 20, 30, 46, 60]


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of the prompts for the embedded model."""
    with open_checkpoint("embedded") as checkpoint:
        return embedded_prompts(load_tokenizer(checkpoint))


@each_variation()
def test_tiny_greedy_output_equals_transformers(
    variation: Variation, tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    jobs = greedy_jobs(tiny_prompts(), 40)
    check_greedy(str(tiny_folder), tiny_oracle, variation, jobs, tally)


@each_variation()
def test_tiny_sampled_output_is_what_the_seeds_draw(
    variation: Variation, tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    jobs = sampled_jobs(tiny_prompts(), 40)
    check_sampled(str(tiny_folder), tiny_oracle, variation, jobs, tally)


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCED)
def test_embedded_greedy_output_equals_transformers(
    name: str, prompts: list[list[int]], embedded_oracle: Oracle, tally: Tally
) -> None:
    jobs = greedy_jobs([prompts[index] for index in REDUCED_PROMPTS], 24)
    check_greedy("embedded", embedded_oracle, VARIATIONS[name], jobs, tally)


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCED)
def test_embedded_sampled_output_is_what_the_seeds_draw(
    name: str, prompts: list[list[int]], embedded_oracle: Oracle, tally: Tally
) -> None:
    jobs = sampled_jobs([prompts[index] for index in REDUCED_PROMPTS], 24)
    check_sampled("embedded", embedded_oracle, VARIATIONS[name], jobs, tally)


@pytest.mark.full
@pytest.mark.usefixtures("all_cores")
@pytest.mark.timeout(7200)
@each_variation()
def test_all_embedded_greedy_output_equals_transformers(
    variation: Variation, prompts: list[list[int]], embedded_oracle: Oracle, tally: Tally
) -> None:
    jobs = greedy_jobs(prompts, 64)
    check_greedy("embedded", embedded_oracle, variation, jobs, tally)


@pytest.mark.full
@pytest.mark.usefixtures("all_cores")
@pytest.mark.timeout(7200)
@each_variation()
def test_all_embedded_sampled_output_is_what_the_seeds_draw(
    variation: Variation, prompts: list[list[int]], embedded_oracle: Oracle, tally: Tally
) -> None:
    jobs = sampled_jobs(prompts, 64)
    check_sampled("embedded", embedded_oracle, variation, jobs, tally)


@pytest.mark.slow
def test_embedded_weights_equal_those_of_transformers_exactly(embedded_oracle: Oracle) -> None:
    expected = dict(embedded_oracle.model.named_parameters())

    with open_checkpoint("embedded") as checkpoint:
        found = {
            one.name: one.to_dense(next(iter(expected.values())).dtype)
            for one in checkpoint.tensors()
        }

    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not tensor.equal(expected[name])] == []
