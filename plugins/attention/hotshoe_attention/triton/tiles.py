"""How much a program computes at a time, by what the layer is and where it runs.

Prompts are bound by the matrix units: tiles are as large as registers hold, which on Hopper are two
groups of four warps, each with 64 rows for its asynchronous products. Decoding is bound by memory:
16 rows are the fewest that the matrix units take, and what counts is that enough loads are under
way, 32 KB on every processor of an H200 by its latency and bandwidth. A tile of 64 positions of 128
dims is 16 KB each of keys and values, and three such programs fit into a processor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotshoe.api import AttentionSpec
from hotshoe_attention.triton.options import TritonAttentionOptions

if TYPE_CHECKING:
    import torch

HOPPER = 90
LEAST = 16
"""Rows and columns of what the matrix units multiply."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one kernel.

    Attributes:
        block_m: rows of queries.
        block_n: positions at a time.
        num_stages: steps that loads and products are spread over. The block table is loaded before
            the pages, so two more stages are one more buffer.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, itemsize: int, padded_dim: int) -> int:
        """About what a program takes: queries, and keys and values of each buffer; a third one is
        for those that an asynchronous product still reads.
        """
        num_buffers = (self.num_stages + 1) // 2
        rows = self.block_m + 2 * num_buffers * self.block_n
        return rows * padded_dim * itemsize


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice depends on, besides the layer.

    Attributes:
        capability: 90 is compute capability 9.0.
        num_processors: streaming multiprocessors.
        shared_bytes: most that a program can have.
    """

    capability: int
    num_processors: int
    shared_bytes: int


def gpu_of(device: torch.device) -> Gpu | None:
    """What a device is; None for the interpreter's."""
    if device.type != "cuda":
        return None
    import torch
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(
        capability=10 * major + minor,
        num_processors=properties["multiprocessor_count"],
        shared_bytes=properties["max_shared_mem"],
    )


def padded_dim_of(spec: AttentionSpec) -> tuple[int, int]:
    """Bytes of an element that is computed with, and the wider of the padded head dims."""
    import torch

    itemsize: int = getattr(torch, spec.dtype).itemsize
    return itemsize, max(next_power_of_two(max(spec.kv.head_dim, spec.kv.head_dim_v)), LEAST)


def next_power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (number - 1).bit_length()


# by bytes of an element, then by padded head_dim
_PREFILL_HOPPER = {
    2: {64: Tile(128, 128, 8, 5), 128: Tile(128, 64, 8, 5), 256: Tile(128, 32, 8, 5)},
    4: {64: Tile(64, 32, 8, 3), 128: Tile(32, 32, 8, 3), 256: Tile(16, 32, 8, 3)},
}
_PREFILL_AMPERE = {
    2: {64: Tile(128, 64, 8, 5), 128: Tile(128, 32, 8, 5), 256: Tile(64, 32, 8, 5)},
    4: {64: Tile(64, 32, 8, 3), 128: Tile(32, 32, 8, 3), 256: Tile(16, 32, 8, 3)},
}
_DECODE = {
    2: {64: Tile(16, 128, 4, 5), 128: Tile(16, 64, 4, 5), 256: Tile(16, 32, 4, 5)},
    4: {64: Tile(16, 32, 4, 5), 128: Tile(16, 32, 8, 5), 256: Tile(16, 16, 8, 5)},
}
_ONE_BUFFER = 3
_INTERPRETED = Tile(32, 16, 1, 1)  # small, so that few tokens make more than one


def prefill_tile(
    gpu: Gpu | None, itemsize: int, padded_dim: int, options: TritonAttentionOptions, *, rows: int
) -> Tile:
    """For tiles of a prompt, with at least so many rows; ``gpu`` is None in the interpreter."""
    tile = _INTERPRETED
    if gpu:
        table = _PREFILL_HOPPER if gpu.capability >= HOPPER else _PREFILL_AMPERE
        tile = _look_up(table, itemsize, padded_dim, gpu)
    return replace(
        tile,
        block_m=max(options.prefill_block_m or tile.block_m, rows),
        block_n=options.prefill_block_n or tile.block_n,
        num_warps=options.prefill_num_warps or tile.num_warps,
        num_stages=options.prefill_num_stages or tile.num_stages,
    )


def decode_tile(
    gpu: Gpu | None, itemsize: int, padded_dim: int, options: TritonAttentionOptions
) -> Tile:
    """For parts of requests with few query tokens, whose ``block_m`` is the least."""
    tile = (
        _look_up(_DECODE, itemsize, padded_dim, gpu) if gpu else replace(_INTERPRETED, block_m=16)
    )
    return replace(
        tile,
        block_n=options.decode_block_n or tile.block_n,
        num_warps=options.decode_num_warps or tile.num_warps,
        num_stages=options.decode_num_stages or tile.num_stages,
    )


def with_room(tile: Tile, itemsize: int, padded_dim: int, gpu: Gpu | None) -> Tile:
    """With so few loads under way that they fit beside the queries of a tile."""
    while (
        gpu and tile.num_stages > 1 and tile.shared_bytes(itemsize, padded_dim) > gpu.shared_bytes
    ):
        tile = replace(tile, num_stages=max(tile.num_stages - 2, 1))
    return tile


def _look_up(table: dict[int, dict[int, Tile]], itemsize: int, padded_dim: int, gpu: Gpu) -> Tile:
    tiles = table[itemsize]
    tile = tiles[min((one for one in tiles if one >= padded_dim), default=max(tiles))]
    # smaller GPUs of a generation have less shared memory
    while tile.shared_bytes(itemsize, padded_dim) > gpu.shared_bytes:
        if tile.num_stages > _ONE_BUFFER:
            tile = replace(tile, num_stages=tile.num_stages - 2)
        elif tile.block_n > LEAST:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            tile = replace(tile, block_m=tile.block_m // 2)
    return tile
