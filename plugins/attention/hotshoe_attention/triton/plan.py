"""Where the device keeps how a layer's work is divided among programs.

Requests with few query tokens (decoding, verification of drafts) are divided by positions into
parts; those with many (prompts) by queries into tiles. One tensor of int32 says who does what::

    number of parts, number of tiles, unused          HEADER numbers
    of each request: its first part; how many it has; its first tile
    of each request and KV head: how many parts are done
    of each part: its request
    of each tile: its request
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER = 16
NUM_PARTS, NUM_TILES = 0, 1
"""Places in the header."""

FIRST_PARTS, PARTS_OF, FIRST_TILES = 0, 1, 2
"""Which of the arrays after the header."""

_NUM_ARRAYS = 3


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the arrays begin, for at most so many requests and parts."""

    num_kv_heads: int
    max_reqs: int
    max_parts: int

    @property
    def arrivals_at(self) -> int:
        return HEADER + _NUM_ARRAYS * self.max_reqs

    @property
    def parts_at(self) -> int:
        return self.arrivals_at + self.max_reqs * self.num_kv_heads

    @property
    def tiles_at(self) -> int:
        return self.parts_at + self.max_parts
