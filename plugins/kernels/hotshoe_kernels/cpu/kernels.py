"""The native ops, on tensors.

What an op is called with is written into a struct that is there already, and not checked: a call
costs a few microseconds, of which a decode step makes hundreds.
"""

# T=num_tokens N=num_heads K=num_kv_heads H=head_dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotshoe.api import Kernels, KernelsCapabilities, ModelLoadError, Recording, Weight
from hotshoe_native.elementwise import (
    AddArgs,
    CopyRowsArgs,
    RmsNormArgs,
    RopeArgs,
    SiluAndMulArgs,
    SiluArgs,
)
from hotshoe_native.linear import (
    DTYPES,
    EmbeddingArgs,
    LinearArgs,
    PackedPart,
    PackedWeight,
    pack_dense,
    pack_quantized,
)
from hotshoe_native.ops import NativeLibrary, NativeOp
from hotshoe_native.quantized import GROUP_SIZE, quantized_rows_bytes
from hotshoe_native.recording import OpRecorder
from hotshoe_native.sampling import most_likely_args
from hotshoe_native.weight_arena import WeightArena


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWeight(Weight):
    """A weight that ``CpuKernels.prepare_weight`` has packed; the tensors are gone.

    Attributes:
        packed: what the ops read.
    """

    packed: PackedWeight


class CpuKernels(Kernels):
    """Every op in one native call, on ``num_threads`` threads of torch's.

    An output row depends on its input row alone, bit for bit, whatever the batch and the number of
    threads. Sums are float32 and rounded once.
    """

    def __init__(
        self,
        capabilities: KernelsCapabilities,
        library: NativeLibrary,
        *,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        self.capabilities = capabilities
        self.num_threads = num_threads
        self._dtype = dtype
        self._library = library
        self._arena = WeightArena()
        self._recorder = OpRecorder(library)
        self._linear, self._linear_args = library.op("linear"), LinearArgs()
        self._linear_silu_and_mul = library.op("linear_silu_and_mul")
        self._embedding, self._embedding_args = library.op("embedding"), EmbeddingArgs()
        self._rms_norm, self._rms_norm_args = library.op("rms_norm"), RmsNormArgs()
        self._silu_and_mul, self._silu_and_mul_args = library.op("silu_and_mul"), SiluAndMulArgs()
        self._rope, self._rope_args = library.op("rope"), RopeArgs()
        self._add, self._add_args = library.op("add"), AddArgs()
        self._silu, self._silu_args = library.op("silu"), SiluArgs()
        self._copy_rows, self._copy_rows_args = library.op("copy_rows"), CopyRowsArgs()
        self._most_likely = library.op("most_likely")
        for args in (
            self._linear_args,
            self._embedding_args,
            self._rms_norm_args,
            self._silu_and_mul_args,
            self._rope_args,
            self._add_args,
            self._silu_args,
        ):
            args.dtype = DTYPES[dtype]

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, CpuWeight)
        packed = weight.packed
        y = torch.empty((x.shape[0], packed.out_features), dtype=self._dtype)
        self._multiply(self._linear, x, packed, packed.address, y)
        return y

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, CpuWeight)
        packed = weight.packed
        y = torch.empty((x.shape[0], packed.out_features), dtype=torch.float32)
        self._multiply(self._linear, x, packed, packed.address, y)
        return y

    def linear_silu_and_mul(self, x: Tensor, weight: Weight) -> Tensor:
        """What ``silu_and_mul`` makes of ``linear``, bit for bit.

        In one op if each half of the weight is one part, or the halves of one part are multiples
        of 32 rows; else in two.
        """
        assert isinstance(weight, CpuWeight)
        packed = weight.packed
        if packed.halves_address is None:
            return self.silu_and_mul(self.linear(x, weight))
        y = torch.empty((x.shape[0], packed.out_features // 2), dtype=self._dtype)
        self._multiply(self._linear_silu_and_mul, x, packed, packed.halves_address, y)
        return y

    def _multiply(
        self, op: NativeOp, x: Tensor, packed: PackedWeight, address: int, y: Tensor
    ) -> None:
        x, stride = _packed_rows(x)
        num_rows, num_columns = y.shape
        args = self._linear_args
        args.y_dtype = DTYPES[y.dtype]
        args.x = x.data_ptr()
        args.x_stride = stride
        args.y = y.data_ptr()
        args.y_stride = num_columns
        args.m = num_rows
        args.weight = address
        if packed.is_quantized:
            num_bytes = quantized_rows_bytes(num_rows, packed.in_features)
            scratch = torch.empty(num_bytes, dtype=torch.uint8)
            args.scratch = scratch.data_ptr()
        op(args, self.num_threads)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a weight; those of ids that are out of range are not numbers."""
        assert isinstance(weight, CpuWeight)
        packed = weight.packed
        token_ids = token_ids.contiguous()
        out = torch.empty((token_ids.shape[0], packed.in_features), dtype=self._dtype)
        args = self._embedding_args
        args.token_ids = token_ids.data_ptr()
        args.out = out.data_ptr()
        args.num_tokens = token_ids.shape[0]
        args.weight = packed.address
        self._embedding(args, self.num_threads)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = _packed_heads(x)
        out = torch.empty(x.shape, dtype=self._dtype)
        args = self._rms_norm_args
        args.x = x.data_ptr()
        args.x_stride, args.x_head_stride, *_ = x.stride()
        if residual is None:
            args.residual = None
            residual = x
        else:
            residual = _packed_heads(residual)
            args.residual = residual.data_ptr()
            args.residual_stride, args.residual_head_stride, *_ = residual.stride()
        args.out = out.data_ptr()
        args.weight = weight.data_ptr()
        shape = x.shape
        args.num_rows, args.num_heads, args.size = (
            shape if len(shape) == 3 else (shape[0], 1, shape[1])
        )
        args.eps = eps
        self._rms_norm(args, self.num_threads)
        return out, residual

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = _packed_heads(q), _packed_heads(k)
        positions = positions.contiguous()
        args = self._rope_args
        args.q = q.data_ptr()
        args.q_token_stride, args.q_head_stride, _ = q.stride()
        args.k = k.data_ptr()
        args.k_token_stride, args.k_head_stride, _ = k.stride()
        args.num_tokens, args.num_heads = q.shape[0], q.shape[1]
        args.num_kv_heads = k.shape[1]
        args.half = cos.shape[1]
        args.positions = positions.data_ptr()
        args.cos = cos.data_ptr()
        args.sin = sin.data_ptr()
        args.table_stride = cos.stride(0)
        self._rope(args, self.num_threads)
        return q, k

    def silu_and_mul(self, x: Tensor) -> Tensor:
        x, stride = _packed_rows(x)
        num_rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((num_rows, size), dtype=self._dtype)
        args = self._silu_and_mul_args
        args.x = x.data_ptr()
        args.x_stride = stride
        args.out = out.data_ptr()
        args.num_rows = num_rows
        args.size = size
        self._silu_and_mul(args, self.num_threads)
        return out

    def silu(self, x: Tensor) -> Tensor:
        x, stride = _packed_rows(x)
        out = torch.empty(x.shape, dtype=self._dtype)
        args = self._silu_args
        args.x = x.data_ptr()
        args.x_stride = stride
        args.out = out.data_ptr()
        args.num_rows, args.size = x.shape
        self._silu(args, self.num_threads)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x, x_stride = _packed_rows(x)
        y, y_stride = _packed_rows(y)
        out = torch.empty(x.shape, dtype=self._dtype)
        args = self._add_args
        args.x, args.y = x.data_ptr(), y.data_ptr()
        args.x_stride, args.y_stride = x_stride, y_stride
        args.out = out.data_ptr()
        args.num_rows, args.size = x.shape
        self._add(args, self.num_threads)
        return out

    def concat(self, tensors: Sequence[Tensor]) -> Tensor:
        num_rows, width = tensors[0].shape[0], sum(one.shape[1] for one in tensors)
        out = torch.empty((num_rows, width), dtype=tensors[0].dtype)
        begin = 0
        for one in tensors:
            self._copy(one, None, out[:, begin:])
            begin += one.shape[1]
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Some rows of x; those that it doesn't have are not numbers."""
        out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype)
        self._copy(x, rows.contiguous(), out)
        return out

    def _copy(self, x: Tensor, rows: Tensor | None, out: Tensor) -> None:
        x, stride = _packed_rows(x)
        item_bytes = x.element_size()
        args = self._copy_rows_args
        args.x = x.data_ptr()
        args.x_stride = stride * item_bytes
        args.x_num_rows = x.shape[0]
        args.rows = None if rows is None else rows.data_ptr()
        args.out = out.data_ptr()
        args.out_stride = out.stride(0) * item_bytes
        args.num_rows = out.shape[0]
        args.row_bytes = x.shape[1] * item_bytes
        self._copy_rows(args, self.num_threads)

    def argmax(self, x: Tensor) -> Tensor:
        x, _ = _packed_rows(x)
        token_ids = torch.empty(x.shape[0], dtype=torch.int64)
        values = torch.empty(x.shape[0], dtype=torch.float32)
        self._most_likely(most_likely_args(x, token_ids, values), self.num_threads)
        return token_ids

    def prepare_weight(self, weight: Weight) -> Weight:
        """Pack a weight, or parts of several formats in a chain.

        Raises:
            ModelLoadError: if dense values are not in the dtype of activations, or the width of a
                quantized weight is no multiple of a group.
        """
        parts = weight.parts or (weight,)
        return CpuWeight(
            format=weight.format,
            out_features=weight.out_features,
            in_features=weight.in_features,
            tensors={},
            parts=tuple(replace(part, tensors={}) for part in weight.parts),
            packed=PackedWeight([self._pack(part) for part in parts]),
        )

    def _pack(self, part: Weight) -> PackedPart:
        tensors = part.tensors
        if part.format == "dense":
            values = tensors["weight"]
            if values.dtype != self._dtype:
                raise ModelLoadError(
                    f"a dense weight has dtype {str(values.dtype)!r}, but activations have "
                    f"{str(self._dtype)!r}; the quantization plugin has to convert it"
                )
            return pack_dense(values, tensors.get("bias"), self._arena)
        if part.in_features % GROUP_SIZE:
            raise ModelLoadError(
                f"a weight of format {part.format!r} has {part.in_features} inputs, which is no "
                f"multiple of {GROUP_SIZE}; keep it dense"
            )
        return pack_quantized(
            self._library,
            part.format,
            tensors["weight" if part.format == "int8" else "blocks"],
            part.in_features,
            self._arena,
            scales=tensors.get("scales"),
            bias=tensors.get("bias"),
        )

    def record(self, run: Callable[[], tuple[Tensor, ...]], sizes: Sequence[int] = ()) -> Recording:
        return self._recorder.record(run, sizes)


def _packed_rows(x: Tensor) -> tuple[Tensor, int]:
    """``x`` itself where values of a row lie side by side, and how far apart its rows are."""
    stride, inner_stride = x.stride()
    if inner_stride == 1:
        return x, stride
    x = x.contiguous()
    return x, x.stride(0)


def _packed_heads(x: Tensor) -> Tensor:
    """``x`` itself where values of a row lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
