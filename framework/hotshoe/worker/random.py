"""The one source of randomness: a counter-based generator, so that a uniform is a function of its
key alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MAX_AHEAD = 1024  # numbers that are drawn together
_DERIVED_SEED = 0x73656564  # the third counter word of ``derive_seed``, which is no ``Purpose``


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Args:
        counter: ``[4, R]`` uint64 holding 32-bit words; not modified.
        key: ``[2, R]`` uint64 holding 32-bit words; not modified.

    Returns:
        ``[4, R]`` uint64 holding 32-bit words.
    """
    even, odd = counter[0::2], counter[1::2]
    multipliers, weyl = _MULTIPLIERS[:, None], _WEYL[:, None]
    keys = key.copy()
    for _ in range(_ROUNDS):
        products = even * multipliers
        # rows of both halves are swapped: word 0 comes from the product of word 2, and so on
        even, odd = ((products >> _SHIFT)[::-1] ^ odd) ^ keys, (products & _LOW)[::-1]
        keys = (keys + weyl) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


class Purpose(IntEnum):
    """What a number of a position is for; each purpose has numbers of its own."""

    TOKEN = 0
    ACCEPTANCE = 1  # of a draft
    REPLACEMENT = 2  # of a draft that is refused


def uniforms(
    seeds: NDArray[np.uint64],
    choice_indices: NDArray[np.int64],
    positions: NDArray[np.int64],
    purpose: Purpose = Purpose.TOKEN,
) -> NDArray[np.float64]:
    """One number per row that depends on nothing but (seed, choice index, position, purpose).

    Args:
        seeds: ``[R]`` uint64.
        choice_indices: ``[R]``, which of the choices of a prompt.
        positions: ``[R]``, of the token in the whole sequence, prompt included.
        purpose: what they are for.

    Returns:
        ``[R]`` float64 in ``[0, 1)``, multiples of ``2**-53``.
    """
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0] = positions
    counter[1] = choice_indices
    counter[2] = purpose
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _SHIFT)))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    numbers: NDArray[np.float64] = (high * 67108864.0 + low) / 9007199254740992.0
    return numbers


class UniformsAhead:
    """``uniforms`` for rows that go on position by position, many positions at once.

    A call for a few numbers takes as long as one for a thousand. So each time that numbers run out,
    twice as many positions are drawn as the time before, up to so many numbers.

    Args:
        seeds: ``[R]`` uint64.
        choice_indices: ``[R]``.
    """

    def __init__(self, seeds: NDArray[np.uint64], choice_indices: NDArray[np.int64]) -> None:
        self._seeds = seeds
        self._choice_indices = choice_indices
        self._columns = np.arange(len(seeds))
        self._first = np.zeros(len(seeds), np.int64)
        self._numbers = np.empty((0, len(seeds)))

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[R]`` numbers, one per row, of any positions."""
        ahead = positions - self._first
        if len(ahead) and (ahead.max() >= len(self._numbers) or ahead.min() < 0):
            self._draw_from(positions)
            ahead = positions - self._first
        numbers: NDArray[np.float64] = self._numbers[ahead, self._columns]
        return numbers

    def _draw_from(self, positions: NDArray[np.int64]) -> None:
        num_rows = len(positions)
        count = max(1, min(2 * len(self._numbers), _MAX_AHEAD // num_rows))
        numbers = uniforms(
            np.tile(self._seeds, count),
            np.tile(self._choice_indices, count),
            (positions + np.arange(count)[:, None]).ravel(),
        )
        self._first, self._numbers = positions, numbers.reshape(count, num_rows)


def derive_seed(engine_seed: int, request_index: int) -> int:
    """The seed of a request that gave none.

    Args:
        engine_seed: the engine's, 0 to ``2**64 - 1``.
        request_index: number of the request in the order of arrival.

    Returns:
        A 64-bit seed; different requests get independent ones.
    """
    counter = _column(request_index & 0xFFFFFFFF, request_index >> 32, _DERIVED_SEED, 0)
    key = _column(engine_seed & 0xFFFFFFFF, engine_seed >> 32)
    words = philox4x32(counter, key)[:, 0]
    return int(words[0]) | int(words[1]) << 32


def _column(*words: int) -> NDArray[np.uint64]:
    values: Sequence[Sequence[int]] = [[word] for word in words]
    return np.array(values, dtype=np.uint64)
