"""Options of attention in Triton."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from hotshoe.api import PluginOptions


def _is_power_of_two(size: int) -> int:
    if size & (size - 1):
        raise ValueError(f"{size!r} is not a power of two")
    return size


_Size = Annotated[int, AfterValidator(_is_power_of_two)]


class TritonAttentionOptions(PluginOptions):
    """Sizes of what a program computes at a time; by default those that suit the layer and GPU."""

    autotune: bool = Field(
        default=False,
        description="Measure at start-up which sizes are quickest for the layers of the model, and "
        "keep them in Triton's cache, by GPU and version of Triton. Takes a minute the first time. "
        "Sizes that are given stay.",
    )
    prefill_block_m: _Size | None = Field(
        default=None,
        ge=16,
        description="Rows of queries (tokens times heads of a KV head) of a tile of a prompt.",
    )
    prefill_block_n: _Size | None = Field(
        default=None, ge=16, description="Positions that such a tile takes at a time."
    )
    prefill_num_warps: _Size | None = Field(
        default=None, ge=1, le=32, description="Warps that compute it."
    )
    prefill_num_stages: int | None = Field(
        default=None, ge=1, le=8, description="Loads that it has under way, in tiles."
    )
    decode_block_n: _Size | None = Field(
        default=None,
        ge=16,
        description="Positions that a part of a decoded request takes at a time.",
    )
    decode_num_warps: _Size | None = Field(
        default=None, ge=1, le=32, description="Warps that compute it."
    )
    decode_num_stages: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Loads that it has under way, in tiles; fewer where drafts leave no room.",
    )
