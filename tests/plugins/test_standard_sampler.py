"""The standard sampler: the conformance suite, and where its fast draw takes the long way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.api import Candidates, Component, SampleInput, Sampler, gumbel_max
from hotshoe.testing.distributions import Filter, assert_follows, filtered_probabilities
from hotshoe.testing.sampler import SamplerConformance, draw_with_drafts, sample_input
from hotshoe_samplers import standard


class TestStandardSampler(SamplerConformance):
    def component(self) -> Component:
        return standard.hotshoe_component()


def standard_sampler(vocab_size: int) -> Sampler:
    return TestStandardSampler().sampler(vocab_size)


class BiasedSampler(Sampler):
    """Moves 2% of the probability from the most likely token to another one."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def candidates(self, inputs: SampleInput) -> Candidates:
        probs = self._inner.candidates(inputs).probs.clone()
        best = probs.argmax(-1)
        rows = torch.arange(len(probs))
        other = (best + 1) % probs.shape[1]
        probs[rows, best] -= 0.02
        probs[rows, other] += 0.02
        return Candidates(probs)


def test_a_sampler_biased_by_two_percent_is_rejected() -> None:
    logits = np.linspace(0, 2, 8).astype(np.float32)
    target = filtered_probabilities(logits, Filter())
    sampler = standard_sampler(8)
    assert_follows(draw_with_drafts(sampler, logits, Filter()), target)
    with pytest.raises(AssertionError, match="don't follow the target"):
        assert_follows(draw_with_drafts(BiasedSampler(sampler), logits, Filter()), target)


def test_a_token_that_the_filter_drops_is_never_drawn() -> None:
    with pytest.raises(AssertionError, match=r"probability 0 were drawn: \[2\]"):
        assert_follows([0, 1, 2], np.array([0.5, 0.5, 0.0]))


def expected_and_drawn(logits: Tensor, chosen: list[Filter], seed: int) -> tuple[Tensor, Tensor]:
    sampler = standard_sampler(logits.shape[1])
    numbers = torch.from_numpy(np.random.default_rng(seed).random(len(chosen)))
    expected = gumbel_max(sampler.candidates(sample_input(logits, chosen)), numbers)
    return expected, sampler.draw(sample_input(logits, chosen), numbers)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_wide_distributions_draw_what_the_definition_draws(scale: float, step: float) -> None:
    filters = [
        Filter(top_p=0.95),
        Filter(top_p=0.5, min_p=0.01),
        Filter(min_p=0.02),
        Filter(top_k=127),
        Filter(top_k=128),
        Filter(top_k=700),
        Filter(top_k=1999, top_p=0.97),
        Filter(top_k=5000, top_p=0.9),
        Filter(temperature=0.3, top_p=0.9999),
        Filter(temperature=20.0, top_p=1e-6),
    ]
    for seed in range(5):
        logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(10, 2000))).float()
        logits *= scale
        if step:
            logits = (logits / step).round() * step
        expected, drawn = expected_and_drawn(logits, filters, seed)
        assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize("chosen", [Filter(top_k=3), Filter(top_p=0.5), Filter(top_k=250)])
def test_equally_probable_tokens_at_the_boundary_are_kept_by_lower_id(chosen: Filter) -> None:
    vocab_size = 500
    probs = standard_sampler(vocab_size).candidates(sample_input(torch.zeros(1, 500), [chosen]))
    num_kept = chosen.top_k or 250
    assert (probs.probs[0, :num_kept] > 0).all()
    assert (probs.probs[0, num_kept:] == 0).all()
    numbers = torch.from_numpy(np.random.default_rng(0).random(2000))
    inputs = sample_input(torch.zeros(2000, vocab_size), [chosen] * 2000)
    drawn = standard_sampler(vocab_size).draw(inputs, numbers)
    assert set(drawn.tolist()) == set(range(num_kept))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 100.0])
def test_extreme_temperatures_give_numbers(temperature: float) -> None:
    logits = torch.tensor([[5.0, -torch.inf, 4.0, -200.0]])
    probs = standard_sampler(4).candidates(sample_input(logits, [Filter(temperature=temperature)]))
    assert torch.isfinite(probs.probs).all()
    assert probs.probs[0, 1] == 0
    assert probs.probs[0, 0] == probs.probs.max()


def test_a_tiny_top_p_leaves_the_most_probable_token() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    chosen = [Filter(top_p=1e-9)] * 4
    expected, drawn = expected_and_drawn(logits, chosen, 0)
    assert drawn.tolist() == expected.tolist() == logits.argmax(-1).tolist()
