"""Options of the kernels in Triton."""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import PluginOptions

MAX_ROWS = 8
"""Most rows of activations that the kernels for few rows take."""


class TritonKernelsOptions(PluginOptions):
    """Up to how many rows of activations products are computed by the kernels for few of them."""

    dense_rows: int = Field(
        default=4,
        ge=0,
        le=MAX_ROWS,
        description="With dense weights; with more rows the vendor's library computes them.",
    )
    quantized_rows: int = Field(
        default=MAX_ROWS,
        ge=0,
        le=MAX_ROWS,
        description="With quantized weights, and activations in 8 bits; more rows are multiplied "
        "on tensor cores, in the dtype of activations.",
    )
