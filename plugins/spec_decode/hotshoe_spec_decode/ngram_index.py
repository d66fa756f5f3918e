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

    Attributes:
        token_ids: that it knows.

    Args:
        max_ngram: length of the longest.
    """

    def __init__(self, max_ngram: int) -> None:
        self.token_ids: list[int] = []
        self._max_ngram = max_ngram
        self._segments: list[_Segment] = []
        self._num_sorted = 0

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Take over the tokens behind those that are known, and sort if that is due."""
        known = self.token_ids
        known += token_ids[len(known) :].tolist()
        num_tokens = len(known) - 1  # the last one is what is looked up
        first = self._num_sorted
        if num_tokens - first <= _MAX_UNSORTED:
            return
        while self._segments and self._segments[-1].num_tokens <= 2 * (num_tokens - first):
            first = self._segments.pop().first
        self._segments.append(_Segment(token_ids[:num_tokens], first, self._max_ngram))
        self._num_sorted = num_tokens

    def find(self, min_ngram: int, max_places: int, *, latest: bool) -> tuple[int, list[int]]:
        """The longest n-gram that ends with the last token and stood somewhere before.

        Args:
            min_ngram: shorter ones don't count.
            max_places: so many places are enough.
            latest: whether the latest ones are looked for, or else the earliest.

        Returns:
            Length of the n-gram, and indices of the tokens behind it wherever it stood, ascending;
            no places = it's new.
        """
        parts: list[tuple[Sequence[int], int, int]] = []
        longest = min_ngram
        if self._segments:
            tail = self.token_ids[-self._max_ngram :]
            for segment in self._segments:
                length, first, end = segment.find(tail)
                if length > longest:
                    longest, parts = length, []
                if length == longest:
                    parts.append((segment.places[length - 1], first, end))
        length, ends = self._search()
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

    def _search(self) -> tuple[int, list[int]]:
        """The longest n-gram, as ``find``, that ended among the tokens that aren't sorted, and all
        places where it did.
        """
        known, last = self.token_ids, len(self.token_ids) - 1
        token_id, at = known[last], self._num_sorted - 1
        ends = []
        for _ in range(known[at + 1 : last].count(token_id)):
            at = known.index(token_id, at + 1)
            ends.append(at)
        if not ends:
            return 0, []
        for length in range(1, self._max_ngram):
            token_id = known[last - length]
            longer = [end for end in ends if end >= length and known[end - length] == token_id]
            if not longer:
                return length, ends
            ends = longer
        return self._max_ngram, ends
