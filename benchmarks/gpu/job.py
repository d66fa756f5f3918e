"""What a part of the measurement is given, and how it opens an engine."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_model import write_config
from sizes import Sizes

from hotshoe import LLM

BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 8192
Tell = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a part is given.

    Attributes:
        sizes: of what it measures.
        bandwidth: bytes a second that a copy moves, read and written; None: not measured.
        matrix_rate: operations a second of a matrix product; None: not measured.
        tell: takes a figure's name and its entries.
    """

    sizes: Sizes
    bandwidth: float | None
    matrix_rate: float | None
    tell: Tell

    def bandwidth_share(self, num_bytes: float, seconds: float) -> float | None:
        """What share of the bandwidth it takes to move so many bytes in that time."""
        return None if self.bandwidth is None else num_bytes / seconds / self.bandwidth

    def matrix_share(self, num_operations: float, seconds: float) -> float | None:
        """Likewise of the matrix rate."""
        return None if self.matrix_rate is None else num_operations / seconds / self.matrix_rate

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and weights."""
        found: torch.dtype = getattr(torch, self.sizes.dtype)
        return found

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device(self.sizes.device)

    @contextmanager
    def llm(self, model: str, batches: Sequence[tuple[int, int]], **changes: Any) -> Iterator[LLM]:
        """An engine on random weights.

        Args:
            model: one of the sizes'.
            batches: numbers of requests and of tokens of each that it has to hold.
            changes: of its configuration.
        """
        lengths = [BLOCK_SIZE * -(-length // BLOCK_SIZE) for _, length in batches]
        max_num_seqs, max_model_len = max(batch for batch, _ in batches), max(lengths)
        num_blocks = max(
            batch * length // BLOCK_SIZE
            for (batch, _), length in zip(batches, lengths, strict=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            source = write_config(Path(folder), dict(self.sizes.models[model]))
            settings: dict[str, Any] = {
                **self.sizes.components,
                "device": self.sizes.device,
                "dtype": self.sizes.dtype,
                "max_model_len": max_model_len,
                "scheduler": {
                    "max_num_seqs": max_num_seqs,
                    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                },
                "cache": {
                    "num_blocks": max(num_blocks, max_model_len // BLOCK_SIZE),
                    "enable_prefix_caching": False,
                },
                **changes,
            }
            with LLM(source, **settings) as llm:
                yield llm


def random_prompts(sizes: Sizes, seed: str, number: int, length: int) -> list[list[int]]:
    """Prompts of ids that every model has."""
    numbers = random.Random(seed)
    num_ids = min(config["vocab_size"] for config in sizes.models.values())
    return [[numbers.randrange(num_ids) for _ in range(length)] for _ in range(number)]
