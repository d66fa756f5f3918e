"""``counting``: plain torch ops for dense and 8-bit weights, each call counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hotshoe.api import (
    Component,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    PluginOptions,
    Weight,
    hookimpl,
)

FORMATS = ("dense", "acme_int8")
CAPABILITIES = KernelsCapabilities(
    weight_formats=FORMATS, embedding_formats=FORMATS, dtypes=("float32",)
)
BUILT: list[CountingKernels] = []


class CountingKernels(Kernels):
    capabilities = CAPABILITIES

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()

    def linear(self, x: Any, weight: Weight) -> Any:
        import torch

        self.num_calls[f"linear {weight.format}"] += 1
        rows = _rows(weight, slice(None))
        return torch.nn.functional.linear(x, rows, weight.tensors.get("bias"))

    def embedding(self, token_ids: Any, weight: Weight) -> Any:
        self.num_calls[f"embedding {weight.format}"] += 1
        return _rows(weight, token_ids)

    def rms_norm(self, x: Any, weight: Any, eps: float, residual: Any = None) -> tuple[Any, Any]:
        self.num_calls["rms_norm"] += 1
        total = x if residual is None else x + residual
        return total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, total

    def rope(self, q: Any, k: Any, positions: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        self.num_calls["rope"] += 1
        return _rotate(q, cos[positions], sin[positions]), _rotate(
            k, cos[positions], sin[positions]
        )

    def silu_and_mul(self, x: Any) -> Any:
        self.num_calls["silu_and_mul"] += 1
        gate, up = x.chunk(2, -1)
        return gate * gate.sigmoid() * up


def _rows(weight: Weight, index: Any) -> Any:
    rows = weight.tensors["weight"][index].float()
    if weight.format == "acme_int8":
        rows = rows * weight.tensors["scale"][index][:, None]
    return rows


def _rotate(heads: Any, cos: Any, sin: Any) -> Any:
    import torch

    half = cos.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def build(options: PluginOptions, context: KernelsContext) -> CountingKernels:
    BUILT.append(CountingKernels())
    return BUILT[-1]


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="kernels/0", factory=build, capabilities=CAPABILITIES)
