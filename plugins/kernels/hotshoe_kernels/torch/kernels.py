"""The small ops between attention calls, in as few torch calls as each can be written in."""

# T=num_tokens N=num_heads K=num_kv_heads H=head_dim R=rotary_dim/2

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hotshoe.api import Kernels, KernelsCapabilities, Weight


class TorchKernels(Kernels):
    """Dense weights only. In float32 every op gives what transformers computes, bit for bit; in
    half precision norms stay in float32 up to their last rounding.
    """

    def __init__(self, capabilities: KernelsCapabilities) -> None:
        self.capabilities = capabilities

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        if weight.parts:
            return torch.cat([self.linear(x, part) for part in weight.parts], -1)
        return F.linear(x, weight.tensors["weight"], weight.tensors.get("bias"))

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = residual.add_(x)
        return F.rms_norm(x, weight.shape, weight, eps), x

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_heads, half = q.shape[1], cos.shape[1]
        cos_T1R = cos.index_select(0, positions).to(q.dtype).unsqueeze(1)
        sin_T1R = sin.index_select(0, positions).to(q.dtype).unsqueeze(1)
        # q and k are rotated as one tensor: at decode the number of calls is what costs
        qk = torch.cat((q, k), 1)
        first, second = qk[..., :half], qk[..., half : 2 * half]
        first_sin, second_sin = first * sin_T1R, second * sin_T1R
        first.mul_(cos_T1R).sub_(second_sin)
        second.mul_(cos_T1R).add_(first_sin)
        return qk[:, :num_heads], qk[:, num_heads:]

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)
