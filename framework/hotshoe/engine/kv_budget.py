"""How large an engine's KV cache is."""

from __future__ import annotations

import logging

import torch

from hotshoe.config import CacheConfig, EngineConfig
from hotshoe.engine.drafting import Drafter
from hotshoe.engine.skeleton import Facts, Skeleton
from hotshoe.kv_cache.sizing import (
    KVBudget,
    MemoryUse,
    available_memory_bytes,
    num_blocks_for_budget,
    num_blocks_for_gpu,
)
from hotshoe.worker.device_memory import CudaMemory

logger = logging.getLogger(__name__)


def kv_budget(
    config: EngineConfig,
    skeleton: Skeleton,
    drafter: Drafter | None,
    facts: Facts,
    use: MemoryUse | None,
) -> KVBudget:
    """How many blocks the KV cache has.

    Args:
        config: of the engine.
        skeleton: of the model.
        drafter: its layers cache, too.
        facts: of the engine.
        use: of a GPU's memory, by all but the KV cache; None on a CPU.

    Raises:
        KVCacheError: if they can't hold one request.
    """
    cache = config.cache
    layers = [*skeleton.attention_layers, *(drafter.attention_layers if drafter else ())]
    layouts = [skeleton.attention.layout(layer.spec) for layer in layers]
    bytes_per_block = sum(layout.bytes_per_block for layout in layouts)
    memory_bytes = None if cache.memory_gb is None else int(cache.memory_gb * 1024**3)
    if use is None:
        free_bytes = available_memory_bytes()
        default_bytes = free_bytes * cache.memory_fraction
    else:
        default_bytes = use.total_bytes * cache.gpu_memory_utilization - use.used_bytes
    _tell_unused(cache, is_gpu=use is not None)
    num_blocks = cache.num_blocks
    if num_blocks is None and memory_bytes is None:
        # more than every row at full length is of no use, and a tiny model would get millions
        most = config.scheduler.max_num_seqs * -(-facts.max_model_len // cache.block_size)
        if not bytes_per_block or most * bytes_per_block < default_bytes:
            num_blocks = most
    if use is not None:
        return num_blocks_for_gpu(
            bytes_per_block=max(bytes_per_block, 1),
            use=use,
            utilization=cache.gpu_memory_utilization,
            memory_bytes=memory_bytes,
            num_blocks=num_blocks,
            max_model_len=facts.max_model_len,
            block_size=cache.block_size,
        )
    return num_blocks_for_budget(
        bytes_per_block=max(bytes_per_block, 1),
        memory_bytes=memory_bytes,
        fraction=cache.memory_fraction,
        free_bytes=free_bytes,
        num_blocks=num_blocks,
        max_model_len=facts.max_model_len,
        block_size=cache.block_size,
    )


def _tell_unused(cache: CacheConfig, *, is_gpu: bool) -> None:
    """A config may be shared by machines, so what only others read is no mistake."""
    unused, used = "gpu_memory_utilization", "memory_fraction"
    if is_gpu:
        unused, used = used, unused
    # a core process is handed every field, so that a field is set doesn't say that somebody did
    if getattr(cache, unused) != CacheConfig.model_fields[unused].default:
        where = "a GPU" if is_gpu else "a CPU"
        logger.warning("cache.%s has no effect on %s; there it is cache.%s", unused, where, used)


def expected_use(device: torch.device, weight_bytes: int) -> MemoryUse | None:
    """About how much of a GPU's memory is used once weights are loaded, as ``kv_budget`` takes it.

    Args:
        device: where the model is to run.
        weight_bytes: of the weights as they are stored.
    """
    if device.type != "cuda":
        return None
    now = CudaMemory(device).now()
    return MemoryUse(now.total_bytes, now.used_bytes + weight_bytes)
