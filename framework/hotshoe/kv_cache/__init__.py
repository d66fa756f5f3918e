"""Paged KV cache bookkeeping: which block holds what, who owns it, and what a prefix hit saves."""

from hotshoe.kv_cache.manager import KVCacheManager, PrefixCacheStats, RequestBlocks
from hotshoe.kv_cache.sizing import KVBudget, available_memory_bytes, num_blocks_for_budget

__all__ = [
    "KVBudget",
    "KVCacheManager",
    "PrefixCacheStats",
    "RequestBlocks",
    "available_memory_bytes",
    "num_blocks_for_budget",
]
