"""The counter-based generator: the published vectors, and what a uniform depends on."""

from __future__ import annotations

import numpy as np
import pytest

from hotshoe.worker.random import UniformsAhead, derive_seed, philox4x32, uniforms

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def uniform(seed: int, choice_index: int, position: int) -> float:
    row = uniforms(np.array([seed], np.uint64), np.array([choice_index]), np.array([position]))
    return float(row[0])


def test_philox_gives_the_published_answers() -> None:
    counters = np.array([case[0] for case in KNOWN_ANSWERS], dtype=np.uint64).T
    keys = np.array([case[1] for case in KNOWN_ANSWERS], dtype=np.uint64).T
    expected = np.array([case[2] for case in KNOWN_ANSWERS], dtype=np.uint64).T
    assert np.array_equal(philox4x32(counters, keys), expected)


def test_a_uniform_does_not_depend_on_the_rows_beside_it() -> None:
    seeds = np.arange(100, dtype=np.uint64) * np.uint64(2**57 + 3)
    choices, positions = np.arange(100) % 5, np.arange(100) * 7
    together = uniforms(seeds, choices, positions)
    alone = [uniform(int(seeds[i]), int(choices[i]), int(positions[i])) for i in range(100)]
    assert together.tolist() == alone


@pytest.mark.parametrize("changed", [(8, 1, 2), (7 + 2**32, 1, 2), (7, 2, 2), (7, 1, 3)])
def test_every_part_of_the_key_matters(changed: tuple[int, int, int]) -> None:
    assert uniform(*changed) != uniform(7, 1, 2)


def test_uniforms_are_below_one_and_spread_evenly() -> None:
    size = 200_000
    values = uniforms(np.full(size, 5, np.uint64), np.zeros(size, np.int64), np.arange(size))
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    statistic = ((counts - size / 100) ** 2 / (size / 100)).sum()
    assert statistic < 161.3  # chi-square with 99 degrees of freedom at 1e-4
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.parametrize("num_rows", [0, 1, 3, 2000])
@pytest.mark.parametrize("strides", [(1,), (1, 2, 4), (0, 700), (5, -3)])
def test_uniforms_drawn_ahead_are_those_of_their_positions(
    num_rows: int, strides: tuple[int, ...]
) -> None:
    rows = np.arange(num_rows)
    seeds, choices = (rows * 77 + 5).astype(np.uint64), rows % 3
    ahead = UniformsAhead(seeds, choices)
    positions = rows * 10 + 1000
    for step in range(40):
        expected = uniforms(seeds, choices, positions)
        assert np.array_equal(ahead.at(positions), expected)
        # rows go on at their own pace, as with drafts
        positions = positions + np.array(
            [strides[(step + row) % len(strides)] for row in rows], int
        )


def test_derived_seeds_are_distinct_64_bit_numbers_that_do_not_change() -> None:
    seeds = {derive_seed(engine, index) for engine in range(20) for index in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**63
    assert derive_seed(0, 1) == 17508685524472124283
    assert derive_seed(2**64 - 1, 2**40) != derive_seed(2**64 - 1, 2**40 + 1)
