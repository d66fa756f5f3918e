"""``NgramIndex``: where a request's last tokens stood before, found without reading them all."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_UNSORTED = 512  # so many tokens are searched as fast as a few


class _Segment:
    """A run of tokens whose n-grams are sorted, by length and then by number.

    The number of an n-gram that ends somewhere stands for its last n-1 tokens and the one before,
    so that a longer one is found by one more look-up. Numbers are exact, no hashes.

    Args:
        token_ids: of the request.
        first: where the run begins; n-grams that end in it may begin before.
        max_ngram: length of the longest.
    """

    __slots__ = ("_keys", "_num_bits", "first", "num_tokens", "places")

    def __init__(self, token_ids: NDArray[np.int32], first: int, max_ngram: int) -> None:
        self.first = first
        self.num_tokens = len(token_ids) - first
        self._num_bits = int(token_ids.max()).bit_length()
        self._keys: list[array[int]] = []
        self.places: list[array[int]] = []
        tokens = token_ids.astype(np.int64)
        ids = np.zeros(self.num_tokens, np.int64)
        for length in range(1, max_ngram + 1):
            skipped = max(length - 1 - first, 0)  # too near the beginning for this length
            begin = first + skipped - (length - 1)
            lefts = tokens[begin : begin + self.num_tokens - skipped]
            if not len(lefts):
                break
            ids = self._sort((ids[len(ids) - len(lefts) :] << self._num_bits) | lefts)

    def _sort(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add a length; returns the number of the n-gram at each place, from the back."""
        num_bits = len(keys).bit_length()
        packed = (keys << num_bits) | np.arange(len(keys))
        packed.sort()
        order = packed & ((1 << num_bits) - 1)
        packed >>= num_bits
        is_new = np.ones(len(keys), bool)
        np.not_equal(packed[1:], packed[:-1], out=is_new[1:])
        ids = np.empty_like(order)
        ids[order] = np.maximum.accumulate(np.where(is_new, np.arange(len(keys)), 0))
        self._keys.append(array("q", packed.tobytes()))
        first = self.first + self.num_tokens - len(keys)
        self.places.append(array("i", (order + first).astype(np.int32).tobytes()))
        return ids

    def find(self, tail: Sequence[int]) -> tuple[int, int, int]:
        """Length of the longest n-gram that ends like ``tail``, and where it begins and ends in
        ``places`` of that length; length 0 = not even the last token is there.
        """
        number = length = first = 0
        for keys, token_id in zip(self._keys, reversed(tail), strict=False):
            key = number << self._num_bits | token_id
            at = bisect_left(keys, key)
            if at == len(keys) or keys[at] != key or token_id >> self._num_bits:
                break
            number = first = at
            length += 1
        if not length:
            return 0, 0, 0
        keys = self._keys[length - 1]
        return length, first, bisect_right(keys, keys[first], first)


class NgramIndex:
    """The n-grams of a request's tokens.

    Older tokens are sorted, the latest ones are searched. Sorted runs grow by being merged, so that
    over all steps a token costs a constant number of sorts at most.

    Args:
        max_ngram: length of the longest.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._segments: list[_Segment] = []
        self._tail: list[int] = []

    @property
    def num_sorted(self) -> int:
        """Tokens that are in sorted runs."""
        return self._segments[-1].first + self._segments[-1].num_tokens if self._segments else 0

    def is_of(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether tokens seem to be those that are known, with more behind them."""
        known = self.num_sorted
        return known < len(token_ids) and (
            token_ids[known - len(self._tail) : known].tolist() == self._tail
        )

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Sort all tokens but the last, if that is due; the known ones have to be the same."""
        num_tokens = len(token_ids) - 1
        first = self.num_sorted
        if num_tokens - first <= _MAX_UNSORTED:
            return
        while self._segments and self._segments[-1].num_tokens <= 2 * (num_tokens - first):
            first = self._segments.pop().first
        segment = _Segment(token_ids[:num_tokens], first, self._max_ngram)
        self._segments.append(segment)
        self._tail = token_ids[max(num_tokens - self._max_ngram, 0) : num_tokens].tolist()

    def find(
        self, token_ids: NDArray[np.int32], min_ngram: int, max_places: int, *, latest: bool
    ) -> tuple[int, list[int]]:
        """The longest n-gram that ends with the last token and stood somewhere before.

        Args:
            token_ids: the tokens that ``extend`` was called with.
            min_ngram: shorter ones don't count.
            max_places: so many places are enough.
            latest: whether the latest ones are looked for, or else the earliest.

        Returns:
            Length of the n-gram, and indices of the tokens behind it wherever it stood, ascending;
            no places = it's new.
        """
        tail = token_ids[-self._max_ngram :].tolist()
        parts: list[tuple[Sequence[int], int, int]] = []
        longest = min_ngram
        for segment in self._segments:
            length, first, end = segment.find(tail)
            if length > longest:
                longest, parts = length, []
            if length == longest:
                parts.append((segment.places[length - 1], first, end))
        length, ends = self._search(token_ids)
        if length > longest:
            longest, parts = length, []
        if length == longest:
            parts.append((ends, 0, len(ends)))
        found: list[int] = []
        for places, first, end in reversed(parts) if latest else parts:
            left = max_places - len(found)
            if latest:
                found[:0] = places[max(end - left, first) : end]
            else:
                found += places[first : min(first + left, end)]
            if len(found) == max_places:
                break
        return longest, [place + 1 for place in found]

    def _search(self, token_ids: NDArray[np.int32]) -> tuple[int, list[int]]:
        """The longest n-gram, as ``find``, that ended among the tokens that aren't sorted, and all
        places where it did.
        """
        first, last = self.num_sorted, len(token_ids) - 1
        ends = np.flatnonzero(token_ids[first:last] == token_ids[last]) + first
        if not len(ends):
            return 0, []
        for length in range(1, self._max_ngram):
            longer = ends[ends >= length]  # the last token itself is none of them
            longer = longer[token_ids[longer - length] == token_ids[last - length]]
            if not len(longer):
                return length, ends.tolist()
            ends = longer
        return self._max_ngram, ends.tolist()
