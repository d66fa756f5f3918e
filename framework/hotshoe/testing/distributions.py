"""What a distribution should be, computed the slow and plain way, and whether draws follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotshoe.api import DRAW_BLOCK

ALPHA = 1e-4
"""Chance that a right sampler fails a check; seeds are fixed, so that it either does or doesn't."""

_Z_ALPHA = 3.719016  # 1 - ALPHA quantile of the normal distribution
_MIN_EXPECTED = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def filtered_probabilities(logits: NDArray[np.floating], chosen: Filter) -> NDArray[np.float64]:
    """Temperature, top_k, top_p and min_p by their definitions, one token after the other.

    Args:
        logits: ``[V]``; ``-inf`` = masked.
        chosen: the parameters; ``temperature`` 0 gives all to the best token.

    Returns:
        ``[V]``, sums to 1.
    """
    values = logits.astype(np.float64)
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    result = np.zeros(len(values))
    if chosen.temperature == 0:
        result[order[0]] = 1
        return result
    weights = np.exp((values - values.max()) / np.float64(np.float32(chosen.temperature)))
    order = order[: chosen.top_k] if chosen.top_k > 0 else order
    limit = np.float64(np.float32(chosen.top_p)) * weights[order].sum()
    mass = 0.0
    for token_id in order:
        is_in_nucleus = chosen.top_p == 1 or mass < limit
        if is_in_nucleus and weights[token_id] >= np.float64(np.float32(chosen.min_p)):
            result[token_id] = weights[token_id]
        mass += weights[token_id]
    probabilities: NDArray[np.float64] = result / result.sum()
    return probabilities


@dataclass(frozen=True, slots=True)
class Draw:
    """What one uniform draws.

    Attributes:
        token_id: the token.
        margin: by how much, in logarithms, the noise that decided was ahead; small ones may be
            decided by rounding.
    """

    token_id: int
    margin: float


def draw_by_noise(probabilities: NDArray[np.float64], uniform: float) -> Draw:
    """``gumbel_max`` by its definition: blocks of token ids, then tokens, the largest logarithm of
    the probability plus Gumbel noise each time.

    Args:
        probabilities: ``[V]``, not all 0.
        uniform: a multiple of ``2**-53`` in ``[0, 1)``.
    """
    starts = np.arange(0, len(probabilities), DRAW_BLOCK)
    sums = np.add.reduceat(probabilities, starts)
    block, block_margin = _largest(sums, uniform, 2**32 + np.arange(len(sums)))
    token_ids = np.arange(len(probabilities))[starts[block] : starts[block] + DRAW_BLOCK]
    place, margin = _largest(probabilities[token_ids], uniform, token_ids)
    return Draw(int(token_ids[place]), min(margin, block_margin))


def _largest(
    weights: NDArray[np.float64], uniform: float, numbers: NDArray[np.int64]
) -> tuple[int, float]:
    """Index of the largest with its noise, and how far the next one is behind."""
    with np.errstate(over="ignore", divide="ignore"):
        key = _splitmix(np.uint64(uniform * 2**53) + _GOLDEN)
        bits = _splitmix(key + numbers.astype(np.uint64) * _GOLDEN) >> np.uint64(12)
        noise = -np.log(-np.log((bits + 0.5) / 2**52))
        scores = np.log(weights) + noise
    order = np.argsort(-scores, kind="stable")
    margin = scores[order[0]] - scores[order[1]] if len(order) > 1 else np.inf
    return int(order[0]), float(margin)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix(values: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64."""
    mixed = np.asarray(values, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def assert_follows(token_ids: Sequence[int], probabilities: NDArray[np.float64]) -> None:
    """Pearson's chi-square test of draws against a distribution, at ``ALPHA``.

    Args:
        token_ids: independent draws.
        probabilities: ``[V]``, sums to 1.

    Raises:
        AssertionError: if a token of probability 0 was drawn, or the test rejects.
    """
    counts = np.bincount(np.asarray(token_ids), minlength=len(probabilities)).astype(np.float64)
    impossible = np.flatnonzero((counts > 0) & (probabilities == 0)).tolist()
    assert not impossible, f"tokens of probability 0 were drawn: {impossible}"
    expected = probabilities * len(token_ids)
    is_rare = expected < _MIN_EXPECTED
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    limit = _chi_square_limit(len(expected) - 1)
    assert statistic <= limit, (
        f"{len(token_ids)} draws don't follow the target: chi-square {statistic:.1f} > {limit:.1f} "
        f"with {len(expected) - 1} degrees of freedom"
    )


def _chi_square_limit(degrees: int) -> float:
    """1 - ALPHA quantile after Wilson and Hilferty (1931)."""
    if degrees <= 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + _Z_ALPHA * spread**0.5) ** 3)
