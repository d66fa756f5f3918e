"""The ops between attention calls on a GPU: Triton's kernels, and torch's where those do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotshoe.api import (
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    NotRecordableError,
    Recording,
    Weight,
)
from hotshoe_kernels.triton import elementwise, few_rows
from hotshoe_kernels.triton.elementwise import packed
from hotshoe_kernels.triton.few_rows import QuantizedRows
from hotshoe_kernels.triton.graphs import GraphRecorder
from hotshoe_kernels.triton.many_rows import product_of_values, quantized_matmul, read_rows
from hotshoe_kernels.triton.options import TritonKernelsOptions
from hotshoe_kernels.triton.weights import PlaneWeight, prepare

_INTERPRETED_PROCESSORS = 1


def build_kernels(
    options: TritonKernelsOptions, capabilities: KernelsCapabilities, context: KernelsContext
) -> TritonKernels:
    """The kernels for a device."""
    device = context.device
    num_processors = _INTERPRETED_PROCESSORS
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonKernels(
        options,
        capabilities,
        dtype=context.dtype,
        num_processors=num_processors,
        recorder=GraphRecorder(device),
    )


class TritonKernels(Kernels):
    """Nothing waits for the GPU, so everything can be captured.

    Sums are float32 and rounded once, but for those parts of half-precision products that cuBLAS
    adds up itself (torch's ``allow_bf16_reduced_precision_reduction``). float32 activations are
    multiplied in float32, not in TF32. Quantized weights meet few rows of activations in 8 bits.

    Args:
        options: how many rows are few.
        capabilities: of the component.
        dtype: of activations.
        num_processors: of the GPU: streaming multiprocessors.
        recorder: for ``record``.
    """

    def __init__(
        self,
        options: TritonKernelsOptions,
        capabilities: KernelsCapabilities,
        *,
        dtype: torch.dtype,
        num_processors: int,
        recorder: GraphRecorder,
    ) -> None:
        self.capabilities = capabilities
        self._options = options
        self._dtype = dtype
        self._num_processors = num_processors
        self._recorder = recorder

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product(x, weight, x.dtype)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product(x, weight, torch.float32)

    def _product(self, x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        num_rows = x.shape[0]
        if weight.format == "dense" and num_rows > self._options.dense_rows:
            return _dense_product(x, weight, dtype)
        x = packed(x)
        out = torch.empty((num_rows, weight.out_features), dtype=dtype, device=x.device)
        if num_rows == 0:
            return out
        quantized: QuantizedRows | None = None
        begin = 0
        for part in weight.parts or (weight,):
            assert isinstance(part, PlaneWeight)
            columns = out[:, begin : begin + part.out_features]
            begin += part.out_features
            if part.format == "dense":
                if num_rows > self._options.dense_rows:
                    columns.copy_(_dense_product(x, part, dtype))
                else:
                    few_rows.dense_product(x, part, columns, self._num_processors)
            elif num_rows > self._options.quantized_rows:
                quantized_matmul(x, part, columns, self._num_processors)
            else:
                quantized = quantized or QuantizedRows(x)
                few_rows.quantized_product(quantized, part, columns, self._num_processors)
        return out

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a weight; those of ids out of range are not numbers if it is quantized."""
        assert isinstance(weight, PlaneWeight)
        if weight.format == "dense":
            return super().embedding(token_ids, weight)
        shape = (token_ids.shape[0], weight.in_features)
        out = torch.empty(shape, dtype=self._dtype, device=token_ids.device)
        read_rows(weight, out, row_ids=token_ids)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return elementwise.rms_norm(x, weight, eps, residual)

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return elementwise.rope(q, k, positions, cos, sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return elementwise.silu_and_mul(x)

    def prepare_weight(self, weight: Weight) -> Weight:
        return prepare(weight, self._dtype)

    def record(self, run: Callable[[], tuple[Tensor, ...]], sizes: Sequence[int] = ()) -> Recording:
        if sizes:
            raise NotRecordableError("a CUDA graph has one size")
        return self._recorder.record(run)


def _dense_product(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    return product_of_values(x, weight.tensors["weight"], weight.tensors.get("bias"), dtype)
