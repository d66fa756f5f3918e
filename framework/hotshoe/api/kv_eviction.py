"""KV-eviction contract: which unreferenced block loses its cached content when a fresh one is
needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionContext:
    """Facts a policy may be built on."""

    num_blocks: int
    block_size: int


class EvictionPolicy(ABC):
    """Orders the free blocks. Built once per engine as ``factory(options, EvictionContext)``.

    The core tells it which blocks are unreferenced and asks for one to reuse; an answer that is not
    among them raises ``KVCacheError``. All three calls should be O(1): they run on the step loop.
    """

    @abstractmethod
    def add(self, block_id: int, is_cached: bool) -> None:
        """The block has no owner any more; ``is_cached`` = its content can still be hit."""

    @abstractmethod
    def remove(self, block_id: int) -> None:
        """The block was hit and has an owner again."""

    @abstractmethod
    def pop(self) -> int:
        """Give up one of the added blocks, to be overwritten. Only called while there is one."""
