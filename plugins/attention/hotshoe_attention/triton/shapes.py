"""What layers of one spec have in common: constants of their kernels, and sizes of grids."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hotshoe.api import AttentionContext, AttentionSpec
from hotshoe_attention.triton.options import TritonAttentionOptions
from hotshoe_attention.triton.plan import PlanLayout
from hotshoe_attention.triton.tiles import (
    LEAST,
    Gpu,
    decode_tile,
    next_power_of_two,
    padded_dim_of,
    prefill_tile,
    with_room,
)

MAX_HEAD_DIM = 512

_ROWS_ALONE = 64  # of a request, where no other request needs tiles
_TOKENS_ALONE = 8  # rather than so many rows: a usual number of drafts, and the token before them
_MOST_ROWS_ALONE = 128
_ROWS_BESIDE_PROMPTS = 32  # most requests of such a step have one token, and pay for the rows
_ENOUGH_POSITIONS = 512  # of a part: what it leaves to combine is 2% of what it reads
_PROGRAMS_PER_PROCESSOR = 3
_ROUNDS = 4  # of programs on all processors, so that the last is a small share
_VALUES_PER_LOAD = 8192  # that one program combines at a time, in registers
_VALUES_TO_WRITE = 8192  # queries of a program, by four warps
_VALUES_PER_WARP = 2048
_FEW_TOKENS = 1024  # a program each is no more than the processors take at once
_FEW_INTERPRETED = 4  # which takes programs one after another


class LayerShape:
    """Sizes that don't depend on the step.

    Attributes:
        max_parts: most parts of a KV head.
        write_arguments: by rotated dims, halved, and tokens of a program: constants of
            ``write_and_plan``, and how it's launched.
        parts_arguments: by most query tokens of a request with parts: those of ``attend_parts``.
        tiles_arguments: those of ``attend_tiles``.
        num_partials: float32 that the parts of any step leave to be combined.
        plan: where the plan keeps what.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        context: AttentionContext,
        gpu: Gpu | None,
        options: TritonAttentionOptions,
    ) -> None:
        kv = spec.kv
        self.spec = spec
        self.num_kv_heads = kv.num_kv_heads
        self._group_size = spec.num_heads // kv.num_kv_heads
        padded = max(next_power_of_two(kv.head_dim), LEAST)
        self._padded_v = max(next_power_of_two(kv.head_dim_v), LEAST)
        itemsize, widest = padded_dim_of(spec)
        rows = next_power_of_two(self._group_size)
        self._tile = prefill_tile(gpu, itemsize, widest, options, rows=rows)
        self._part = decode_tile(gpu, itemsize, widest, options)
        programs = _PROGRAMS_PER_PROCESSOR * (gpu.num_processors if gpu else 1)
        self._min_programs = -(-programs // kv.num_kv_heads)
        self._max_programs = _ROUNDS * self._min_programs
        self.max_parts = context.max_num_seqs + self._max_programs
        self.plan = PlanLayout(kv.num_kv_heads, context.max_num_seqs, self.max_parts)
        self._constants = {
            "GROUP_SIZE": self._group_size,
            "NUM_KV_HEADS": kv.num_kv_heads,
            "HEAD_DIM": kv.head_dim,
            "HEAD_DIM_V": kv.head_dim_v,
            "PADDED_DIM_V": self._padded_v,
            "BLOCK_SIZE": context.block_size,
            "WINDOW": kv.sliding_window or 0,
            "MAX_REQS": context.max_num_seqs,
        }
        self._padded = padded
        self._gpu, self._itemsize, self._widest = gpu, itemsize, widest
        self._few_tokens = _FEW_TOKENS if gpu else _FEW_INTERPRETED
        rows = max(self._rows(self.max_part_tokens(tokens)) for tokens in range(1, _ROWS_ALONE + 1))
        # a layer is launched in microseconds, and these dicts take several
        self.write_arguments = cache(self._write_arguments)
        self.parts_arguments = cache(self._parts_arguments)
        self.tiles_arguments = cache(self._tiles_arguments)
        self.num_partials = self.max_parts * kv.num_kv_heads * rows * (self._padded_v + 2)

    def max_part_tokens(self, max_query_len: int) -> int:
        """Query tokens of a request up to which it is divided into parts, in a step that has such
        requests.
        """
        alone = max(
            _ROWS_ALONE // self._group_size,
            min(_TOKENS_ALONE, _MOST_ROWS_ALONE // self._group_size),
        )
        if max_query_len <= max(alone, 1):
            return max_query_len
        return max(_ROWS_BESIDE_PROMPTS // self._group_size, 1)

    def num_parts(self, num_reqs: int, max_seq_len: int) -> int:
        """Most parts that there can be of a KV head in such a step."""
        longest = -(-max_seq_len // self._part.block_n)
        return min(num_reqs + self._max_programs, num_reqs * -(-longest // 2))

    def num_tiles(self, num_reqs: int, num_tokens: int, max_part_tokens: int) -> int:
        """Most tiles that there can be of a KV head in such a step."""
        num_prompts = min(num_reqs, num_tokens // (max_part_tokens + 1))
        return (num_tokens + num_prompts * (self._tile_tokens - 1)) // self._tile_tokens

    def block_t(self, num_tokens: int) -> int:
        """Tokens that a program rotates and writes."""
        most = _VALUES_TO_WRITE // (next_power_of_two(self._group_size) * self._padded)
        return 1 if num_tokens <= self._few_tokens else max(most, 1)

    def _write_arguments(self, half: int, block_t: int) -> dict[str, Any]:
        rows = next_power_of_two(block_t * self._group_size)
        return {
            **self._constants,
            "HALF": half,
            "PADDED_HALF": next_power_of_two(max(half, 1)),
            "PADDED_REST": next_power_of_two(max(self.spec.kv.head_dim - 2 * half, 1)),
            "BLOCK_T": block_t,
            "BLOCK_R": rows,
            "ARRIVALS_AT": self.plan.arrivals_at,
            "PARTS_AT": self.plan.parts_at,
            "TILES_AT": self.plan.tiles_at,
            "BLOCK_N": self._part.block_n,
            "TILE_TOKENS": self._tile_tokens,
            "MIN_PROGRAMS": self._min_programs,
            "MAX_PROGRAMS": self._max_programs,
            "ENOUGH": max(_ENOUGH_POSITIONS // self._part.block_n, 2),
            "num_warps": min(-(-rows * self._padded // _VALUES_PER_WARP), 4),
        }

    def _parts_arguments(self, max_part_tokens: int) -> dict[str, Any]:
        rows = self._rows(max_part_tokens)
        # a tile is chosen for the fewest rows, and drafts have more
        part = replace(self._part, block_m=max(rows, LEAST))
        part = with_room(part, self._itemsize, self._widest, self._gpu)
        return {
            **self._constants,
            "PADDED_DIM": self._padded,
            "ARRIVALS_AT": self.plan.arrivals_at,
            "PARTS_AT": self.plan.parts_at,
            "STATES_AT": self.max_parts * self.num_kv_heads * rows * self._padded_v,
            "BLOCK_M": part.block_m,
            "BLOCK_N": part.block_n,
            "ROWS": rows,
            "PARTS_PER_LOAD": max(_VALUES_PER_LOAD // (rows * self._padded_v), 1),
            "num_warps": max(part.num_warps, rows // LEAST),
            "num_stages": part.num_stages,
        }

    def _tiles_arguments(self) -> dict[str, Any]:
        return {
            **self._constants,
            "PADDED_DIM": self._padded,
            "TILES_AT": self.plan.tiles_at,
            "BLOCK_M": self._tile.block_m,
            "BLOCK_N": self._tile.block_n,
            "TILE_TOKENS": self._tile_tokens,
            "num_warps": self._tile.num_warps,
            "num_stages": self._tile.num_stages,
        }

    @property
    def _tile_tokens(self) -> int:
        return self._tile.block_m // self._group_size

    def _rows(self, max_part_tokens: int) -> int:
        return next_power_of_two(max_part_tokens * self._group_size)
