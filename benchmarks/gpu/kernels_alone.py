"""Parts of the measurement that run kernels without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from job import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, Job
from timing import seconds_per_call
from torch import Tensor

from hotshoe.api import (
    AttentionContext,
    AttentionSpec,
    KernelsContext,
    KVCacheSpec,
    SampleInput,
    SamplerContext,
    Weight,
)
from hotshoe.plugins import PluginRegistry
from hotshoe.testing.attention_reference import LayerFacts
from hotshoe.testing.forward import allocate_cache, make_batch
from hotshoe.weights.gguf import BLOCK_SIZES


def attention(job: Job) -> None:
    """The attention of one layer in a decode step, again and again."""
    num_heads, num_kv_heads, head_dim = job.sizes.attention_heads
    num_reqs, context = job.sizes.attention_batch
    spec = AttentionSpec(
        num_heads=num_heads,
        kv=KVCacheSpec(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=job.sizes.dtype,
        ),
        scale=head_dim**-0.5,
        dtype=job.sizes.dtype,
    )
    registry = PluginRegistry()
    backend = registry.build(
        registry.load("attention", job.sizes.attention),
        {},
        AttentionContext(
            device=job.device,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_reqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=context,
        ),
        section="attention",
    )
    blocks_per_request = -(-context // BLOCK_SIZE)
    num_blocks = num_reqs * blocks_per_request
    cache = allocate_cache(backend, spec, num_blocks, job.device)
    for pages in cache.values():
        pages.normal_()
    order = list(range(num_blocks))
    random.Random(0).shuffle(order)
    tables = [
        order[start : start + blocks_per_request]
        for start in range(0, num_blocks, blocks_per_request)
    ]
    batch = make_batch([1] * num_reqs, [context] * num_reqs, tables, BLOCK_SIZE, device=job.device)
    metadata = backend.build_metadata(batch, spec.kv)
    q, k, v = (
        torch.randn(num_reqs, heads, head_dim, device=job.device, dtype=job.dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    layer = LayerFacts(spec)

    def run(_: int) -> Tensor:
        return backend.forward(layer, q, k, v, cache, metadata)

    num_bytes = 2 * num_reqs * context * num_kv_heads * head_dim * job.dtype.itemsize
    for is_recorded in (False, True):  # if it can't be recorded, there is a figure all the same
        with torch.inference_mode():
            seconds = seconds_per_call(
                run, job.sizes.device, job.sizes.num_repeats, is_recorded=is_recorded
            )
        job.tell(
            "decode",
            {
                "num_reqs": num_reqs,
                "context": context,
                "us": 1e6 * seconds,
                "share_of_bandwidth": job.bandwidth_share(num_bytes, seconds),
                "is_recorded": is_recorded,
            },
        )


def linears(job: Job) -> None:
    """Products with weights of every format that the kernels execute."""
    registry = PluginRegistry()
    kernels = registry.build(
        registry.load("kernels", job.sizes.kernels),
        {},
        KernelsContext(device=job.device, dtype=job.dtype),
        section="kernels",
    )
    for weight_format in kernels.capabilities.weight_formats:
        if weight_format not in _TENSORS:
            continue
        for n, k in job.sizes.linear_shapes:
            # several, so that none is in the cache when its turn comes
            weights = [_random_weight(weight_format, n, k, job) for _ in range(4)]
            num_bytes = sum(one.nbytes for one in weights[0].tensors.values())
            prepared = [kernels.prepare_weight(one) for one in weights]
            for num_rows in job.sizes.linear_rows:
                x = torch.randn(num_rows, k, device=job.device, dtype=job.dtype)

                def run(number: int, prepared: Any = prepared, x: Tensor = x) -> Tensor:
                    return kernels.linear(x, prepared[number % len(prepared)])

                with torch.inference_mode():
                    seconds = seconds_per_call(
                        run, job.sizes.device, job.sizes.num_repeats, is_recorded=True
                    )
                moved = num_bytes + (n + k) * num_rows * job.dtype.itemsize
                job.tell(
                    f"{weight_format} {n} x {k}, {num_rows} tokens",
                    {
                        "us": 1e6 * seconds,
                        "share_of_bandwidth": job.bandwidth_share(moved, seconds),
                        "share_of_matrix_rate": job.matrix_share(2 * n * k * num_rows, seconds),
                    },
                )


def draws(job: Job) -> None:
    """What samplers take for a step's tokens, from random logits that are copied first, because a
    sampler may overwrite them.
    """
    registry = PluginRegistry()
    for name in job.sizes.samplers:
        for num_rows, vocab_size in job.sizes.drawn:
            context = SamplerContext(device=job.device, vocab_size=vocab_size)
            sampler = registry.build(
                registry.load("samplers", name), {}, context, section="sampler"
            )
            uniforms = torch.rand(num_rows, device=job.device, dtype=torch.float64)
            for kind, parameters in _DRAWS.items():
                inputs = _sample_input(num_rows, vocab_size, job, **parameters)

                def run(
                    _: int,
                    sampler: Any = sampler,
                    inputs: SampleInput = inputs,
                    uniforms: Tensor = uniforms,
                ) -> Tensor:
                    drawn: Tensor = sampler.draw(
                        replace(inputs, logits=inputs.logits.clone()), uniforms
                    )
                    return drawn

                with torch.inference_mode():
                    seconds = seconds_per_call(
                        run, job.sizes.device, job.sizes.num_repeats, is_recorded=True
                    )
                figure = f"{name}, {num_rows} rows of {vocab_size}, {kind}"
                job.tell(figure, {"us": 1e6 * seconds})


_DRAWS: dict[str, dict[str, float]] = {
    "as they are": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
}


def _sample_input(
    num_rows: int, vocab_size: int, job: Job, top_k: float = 0, top_p: float = 1
) -> SampleInput:
    device = job.device
    return SampleInput(
        logits=3 * torch.randn(num_rows, vocab_size, device=device),
        temperature=torch.ones(num_rows, device=device),
        top_k=torch.full((num_rows,), int(top_k), device=device),
        top_p=torch.full((num_rows,), float(top_p), device=device),
        min_p=torch.zeros(num_rows, device=device),
        is_all_greedy=False,
        is_any_filtered=top_k > 0 or top_p < 1,
        extra_args=[None] * num_rows,
    )


def _random_weight(weight_format: str, n: int, k: int, job: Job) -> Weight:
    tensors = _TENSORS[weight_format](n, k, job)
    return Weight(format=weight_format, out_features=n, in_features=k, tensors=tensors)


def _dense(n: int, k: int, job: Job) -> dict[str, Tensor]:
    return {"weight": torch.randn(n, k, device=job.device, dtype=job.dtype) * k**-0.5}


def _int8(n: int, k: int, job: Job) -> dict[str, Tensor]:
    weight = torch.randint(-127, 128, (n, k), device=job.device, dtype=torch.int8)
    return {"weight": weight, "scales": torch.full((n,), 0.01 * k**-0.5, device=job.device)}


def _blocks(weight_format: str, num_scales: int) -> Callable[[int, int, Job], dict[str, Tensor]]:
    """Random blocks behind scales that are none too large."""

    def make(n: int, k: int, job: Job) -> dict[str, Tensor]:
        values_per_block, bytes_per_block = BLOCK_SIZES[weight_format]
        shape = (n, k // values_per_block, bytes_per_block)
        blocks = torch.randint(0, 256, shape, device=job.device, dtype=torch.uint8)
        scales = torch.full((*shape[:2], num_scales), 0.01 * k**-0.5, device=job.device)
        blocks[..., : 2 * num_scales] = scales.half().view(torch.uint8)
        return {"blocks": blocks.view(n, -1)}

    return make


_TENSORS: dict[str, Callable[[int, int, Job], dict[str, Tensor]]] = {
    "dense": _dense,
    "int8": _int8,
    "q8_0": _blocks("q8_0", 1),
    "q4_0": _blocks("q4_0", 1),
    "q4_1": _blocks("q4_1", 2),
}
