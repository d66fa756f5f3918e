"""The Triton sampler in the interpreter: what it draws, against the definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.api import Sampler, SamplerContext, gumbel_max
from hotshoe.testing.distributions import Filter
from hotshoe.testing.sampler import random_batch, sample_input
from hotshoe_samplers import triton


def triton_sampler(vocab_size: int) -> Sampler:
    component = triton.hotshoe_component()
    context = SamplerContext(device=torch.device("cpu"), vocab_size=vocab_size)
    built: Sampler = component.factory(component.options(), context)  # type: ignore[assignment]
    return built


def check(logits: Tensor, chosen: list[Filter], seed: int) -> None:
    sampler = triton_sampler(logits.shape[1])
    numbers = torch.from_numpy(np.random.default_rng(seed).random(len(chosen)))
    expected = gumbel_max(sampler.candidates(sample_input(logits, chosen)), numbers)
    inputs = sample_input(logits, chosen)
    assert sampler.draw(inputs, numbers).tolist() == expected.tolist()


def check_random_batch(vocab_size: int, seed: int, rows: slice) -> None:
    logits, chosen = random_batch(vocab_size, seed)
    check(logits[rows], chosen[rows], seed)


@pytest.mark.parametrize("vocab_size", [8, 9000])
def test_draws_are_those_of_the_definition(vocab_size: int) -> None:
    check_random_batch(vocab_size, seed=0, rows=slice(10))


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [8, 300, 1500, 5000, 9000])
def test_many_draws_are_those_of_the_definition(vocab_size: int) -> None:
    for seed in range(5):
        check_random_batch(vocab_size, seed, slice(None))


def test_equal_logits_are_kept_by_lower_id() -> None:
    filters = [Filter(top_k=3), Filter(top_p=0.5), Filter(top_k=250, top_p=0.1), Filter(top_k=499)]
    for seed in range(3):
        check(torch.zeros(4, 500), filters, seed)
    coarse = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 500)).round(1)).float()
    check(coarse, filters, 0)


def test_extreme_parameters_draw_what_the_definition_draws() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 600))).float()
    logits[4] = -torch.inf
    logits[4, [3, 500]] = torch.tensor([-1e4, 1e4])
    filters = [
        Filter(temperature=1e-30, top_p=0.5),
        Filter(temperature=20.0, top_p=1e-6),
        Filter(top_p=0.99999, min_p=1.0),
        Filter(top_k=1, top_p=1e-30),
        Filter(top_k=100, top_p=0.9),
        Filter(top_k=10_000, min_p=0.01),
    ]
    check(logits, filters, 1)


def test_float16_rows_of_a_wider_tensor_are_read_where_they_are() -> None:
    logits, chosen = random_batch(300)
    wide = torch.full((len(chosen), 333), 100.0, dtype=torch.float16)
    wide[:, :300] = logits
    numbers = torch.from_numpy(np.random.default_rng(2).random(len(chosen)))[:10]
    sampler = triton_sampler(300)
    expected = sampler.draw(sample_input(wide[:10, :300].float(), chosen[:10]), numbers)
    inputs = replace(sample_input(logits[:10], chosen[:10]), logits=wide[:10, :300])
    assert sampler.draw(inputs, numbers).tolist() == expected.tolist()
