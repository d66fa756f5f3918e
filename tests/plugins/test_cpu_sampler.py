"""The native sampler: the conformance suite, and its draws against the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotshoe.api import Component, Sampler, SamplerContext, ShapeError
from hotshoe.testing.distributions import (
    Filter,
    assert_follows,
    draw_by_noise,
    filtered_probabilities,
)
from hotshoe.testing.sampler import NOISE, SamplerConformance, sample_input
from hotshoe_native.isa import available
from hotshoe_native.options import NativeOptions
from hotshoe_samplers import cpu, standard

ISAS = [isa.name for isa in available()]
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
CPU = torch.device("cpu")


class TestCpuSampler(SamplerConformance):
    def component(self) -> Component:
        return cpu.hotshoe_component()


def cpu_sampler(vocab_size: int, isa: str = "auto", num_threads: int = 1) -> Sampler:
    options = NativeOptions.model_validate({"isa": isa, "num_threads": num_threads})
    return cpu.build(options, SamplerContext(device=CPU, vocab_size=vocab_size))


def definition(vocab_size: int) -> Sampler:
    context = SamplerContext(device=CPU, vocab_size=vocab_size)
    return standard.build(standard.hotshoe_component().options(), context)


def assert_draws_what_the_definition_draws(
    sampler: Sampler, logits: Tensor, chosen: Sequence[Filter], seed: int
) -> None:
    """Token by token, but for those that rounding decides."""
    numbers = torch.from_numpy(np.random.default_rng(seed).random(len(chosen)))
    drawn = sampler.draw(sample_input(logits, chosen), numbers)
    candidates = definition(logits.shape[1]).candidates(sample_input(logits.float(), chosen))
    for row, probs in enumerate(candidates.probs.double().numpy()):
        expected = draw_by_noise(probs, float(numbers[row]))
        assert drawn[row] == expected.token_id or expected.margin < NOISE, f"{row} {chosen[row]}"


FILTERS = [
    Filter(),
    Filter(temperature=1e-6),
    Filter(temperature=0.3),
    Filter(temperature=100.0),
    Filter(top_k=1),
    Filter(top_k=50),
    Filter(temperature=100.0, top_k=1000),
    Filter(top_p=0.95),
    Filter(top_p=1e-6),
    Filter(temperature=20.0, top_p=0.5),
    Filter(temperature=0.7, top_p=0.9999),
    Filter(min_p=0.05),
    Filter(min_p=1.0),
    Filter(top_p=0.9, min_p=0.01),
    Filter(top_k=40, top_p=0.9),
    Filter(temperature=1.5, top_k=3000, top_p=0.97, min_p=0.001),
    Filter(top_k=10**9, top_p=0.5),
    Filter(temperature=0),
]


def shaped(kind: str, vocab_size: int, seed: int) -> Tensor:
    """A row per filter."""
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(size=(len(FILTERS), vocab_size))
    if kind == "peaked":
        logits = logits * 3 + np.where(numbers.random(logits.shape) < 0.001, 12.0, 0.0)
    elif kind == "flat":
        logits *= 0.01
    elif kind == "tied":
        logits = np.round(logits)
    elif kind == "equal":
        logits = np.full_like(logits, 2.5)
    elif kind == "masked":
        logits[numbers.random(logits.shape) < 0.7] = -np.inf
        logits[:, -1] = 0.0
    elif kind == "one_left":
        logits[:] = -np.inf
        logits[:, vocab_size // 2] = -7.0
    elif kind == "outliers":
        logits[:, 3], logits[:, 5], logits[:, 7] = 60.0, -1e30, np.finfo(np.float32).min
    return torch.from_numpy(logits.astype(np.float32))


KINDS = ["normal", "peaked", "flat", "tied", "equal", "masked", "one_left", "outliers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [17, 5003])
@pytest.mark.parametrize("num_rows", [1, len(FILTERS)])
def test_candidates_are_those_of_the_definition(kind: str, vocab_size: int, num_rows: int) -> None:
    logits = shaped(kind, vocab_size, 4)
    for first in range(0, len(FILTERS), num_rows):
        rows = slice(first, first + num_rows)
        found, expected = (
            one.candidates(sample_input(logits[rows].clone(), FILTERS[rows])).probs
            for one in (cpu_sampler(vocab_size), definition(vocab_size))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


@EVERY_ISA
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [17, 1000, 5003])
def test_draws_are_those_of_the_definition(kind: str, vocab_size: int, isa: str) -> None:
    sampler = cpu_sampler(vocab_size, isa)
    for seed in range(4):
        logits = shaped(kind, vocab_size, seed)
        assert_draws_what_the_definition_draws(sampler, logits, FILTERS, seed)


@EVERY_ISA
@pytest.mark.parametrize("kind", ["peaked", "tied", "masked"])
def test_half_precision_logits_are_taken_as_they_are(kind: str, isa: str) -> None:
    sampler = cpu_sampler(3001, isa)
    for seed in range(4):
        logits = shaped(kind, 3001, seed).bfloat16()
        assert_draws_what_the_definition_draws(sampler, logits, FILTERS, seed)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 700),
    scale=st.sampled_from([1e-4, 0.1, 1.0, 8.0]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    temperature=st.floats(1e-6, 100.0),
    top_k=st.integers(0, 800),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_draws_are_those_of_the_definition_for_any_parameters(
    seed: int,
    vocab_size: int,
    scale: float,
    step: float,
    masked: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(size=(4, vocab_size)) * scale
    if step:
        logits = np.round(logits / step) * step
    logits[numbers.random(logits.shape) < masked] = -np.inf
    logits[:, int(numbers.integers(vocab_size))] = 0.5
    chosen = Filter(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    each = [chosen, Filter(temperature=temperature, top_p=top_p), Filter(top_k=top_k), chosen]
    rows = torch.from_numpy(logits.astype(np.float32))
    assert_draws_what_the_definition_draws(cpu_sampler(vocab_size), rows, each, seed)


@EVERY_ISA
@pytest.mark.parametrize(
    "chosen",
    [
        Filter(temperature=1.3),
        Filter(top_k=20),
        Filter(top_p=0.8),
        Filter(temperature=2.0, top_k=60, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution_of_the_definition(chosen: Filter, isa: str) -> None:
    vocab_size, num_draws = 300, 20_000
    logits = np.random.default_rng(8).normal(size=vocab_size).astype(np.float32) * 2
    numbers = torch.from_numpy(np.random.default_rng(9).random(num_draws))
    rows = torch.from_numpy(logits).expand(num_draws, -1)
    drawn = cpu_sampler(vocab_size, isa).draw(sample_input(rows, [chosen] * num_draws), numbers)
    assert_follows(drawn.tolist(), filtered_probabilities(logits, chosen))


@EVERY_ISA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_depends_neither_on_threads_nor_on_the_rows_beside_it(
    isa: str, dtype: torch.dtype
) -> None:
    vocab_size = 2003
    logits = torch.cat([shaped(kind, vocab_size, 1) for kind in KINDS]).to(dtype)
    chosen = FILTERS * len(KINDS)
    numbers = torch.from_numpy(np.random.default_rng(2).random(len(chosen)))
    one = cpu_sampler(vocab_size, isa)
    together = one.draw(sample_input(logits, chosen), numbers)
    shared = cpu_sampler(vocab_size, isa, num_threads=2).draw(sample_input(logits, chosen), numbers)
    assert shared.tolist() == together.tolist()
    for row in range(len(chosen)):
        alone = sample_input(logits[row : row + 1], chosen[row : row + 1])
        assert one.draw(alone, numbers[row : row + 1]) == together[row]


@EVERY_ISA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 1024, 3333])
def test_most_likely_is_the_first_of_the_largest(
    vocab_size: int, dtype: torch.dtype, isa: str
) -> None:
    numbers = np.random.default_rng(vocab_size)
    logits = np.round(numbers.normal(size=(40, vocab_size)))
    logits[3] = -np.inf
    logits[4] = 0.0
    logits[5] = -3e38
    logits[6, -1] = np.inf
    rows = torch.from_numpy(logits).to(dtype)
    for num_threads in (1, 2):
        found, best = cpu_sampler(vocab_size, isa, num_threads).most_likely(rows)
        assert found.tolist() == logits.argmax(-1).tolist()
        assert best.tolist() == rows.float().amax(-1).tolist()


@EVERY_ISA
def test_most_likely_finds_what_is_not_a_number(isa: str) -> None:
    rows = torch.zeros(3, 3000)
    rows[1, 0] = torch.nan
    rows[2, 2999], rows[2, 5] = torch.nan, 9.0
    found, best = cpu_sampler(3000, isa).most_likely(rows)
    assert found.tolist() == [0, 0, 2999]
    assert best.isnan().tolist() == [False, True, True]


def test_rows_may_lie_apart_and_columns_too() -> None:
    wide = torch.randn(8, 1500, generator=torch.Generator().manual_seed(0))
    for rows in (wide[:, 100:1100], wide[::2], wide.t().contiguous().t()):
        chosen = [Filter(top_p=0.9)] * len(rows)
        inputs = sample_input(rows, chosen)
        numbers = torch.from_numpy(np.random.default_rng(0).random(len(rows)))
        sampler = cpu_sampler(rows.shape[1])
        packed = sampler.draw(sample_input(rows.clone().contiguous(), chosen), numbers)
        object.__setattr__(inputs, "logits", rows)
        assert sampler.draw(inputs, numbers).tolist() == packed.tolist()
        assert sampler.most_likely(rows)[0].tolist() == rows.argmax(-1).tolist()


def test_logits_of_another_width_are_refused() -> None:
    with pytest.raises(ShapeError, match="logits are 9 wide, not 8"):
        cpu_sampler(8).most_likely(torch.zeros(1, 9))
