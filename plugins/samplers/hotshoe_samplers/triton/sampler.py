"""The definition of ``standard``, drawn from by one kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hotshoe.api import Candidates, SampleInput, SamplerCapabilities
from hotshoe_samplers.standard.sampler import StandardSampler
from hotshoe_samplers.triton.draw import BLOCK, NUM_WARPS, ROOM, draw_rows

# R=rows


class TritonSampler(StandardSampler):
    """Temperature, top_k, top_p and min_p as ``StandardSampler`` defines them.

    A draw reads a row about ten times whatever its distribution looks like, mostly from the GPU's
    cache; each row is worked on by one multiprocessor.

    Args:
        capabilities: of the plugin.
    """

    def __init__(self, capabilities: SamplerCapabilities) -> None:
        self.capabilities = capabilities

    def compile(self, device: torch.device, vocab_size: int) -> None:
        """Compile the kernel for every type of logits, so that no request has to wait for it."""
        numbers = torch.ones(1, device=device)
        for name in self.capabilities.logits_dtypes:
            inputs = SampleInput(
                logits=torch.zeros(1, vocab_size, dtype=getattr(torch, name), device=device),
                temperature=numbers,
                top_k=torch.ones(1, dtype=torch.int64, device=device),
                top_p=numbers,
                min_p=numbers,
                is_all_greedy=False,
                is_any_filtered=False,
                extra_args=[None],
            )
            self.draw(inputs, torch.zeros(1, dtype=torch.float64, device=device))

    def candidates(self, inputs: SampleInput) -> Candidates:
        """The definition, in float32 whatever the logits come in."""
        return super().candidates(replace(inputs, logits=inputs.logits.float()))

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        """The same tokens in one launch."""
        logits = inputs.logits
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows:
            draw_rows[(num_rows,)](
                logits,
                inputs.temperature,
                inputs.top_k,
                inputs.top_p,
                inputs.min_p,
                uniforms,
                token_ids,
                torch.empty((num_rows, ROOM.value), device=logits.device),
                vocab_size,
                logits.stride(0),
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
        return token_ids
