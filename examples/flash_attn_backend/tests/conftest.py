"""What stands for the library where it isn't installed: its two functions, written from their
documentation, in float64 and one query at a time. Where it is installed, it is tested itself.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One sequence, ``[num_queries, num_heads, head_dim]``; the last query is at the last key."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(q)
    for at in range(num_queries):
        own = at + num_keys - num_queries
        before, after = window_size
        first = 0 if before < 0 else max(own - before, 0)
        last = num_keys - 1 if after < 0 else min(own + after, num_keys - 1)
        last = min(last, own) if causal else last
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            keys, values = (one[first : last + 1, kv_head].double() for one in (k, v))
            logits = keys @ q[at, head].double() * scale
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            out[at, head] = (logits.softmax(0) @ values).to(out.dtype)
    return out


def gathered(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first positions of one sequence, out of its pages."""
    page_size = pages.shape[1]
    return pages[table[: -(-length // page_size)].long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert block_table is not None
    assert block_table.dtype == cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = torch.empty_like(q)
    for index, table in enumerate(block_table):
        queries = slice(starts_q[index], starts_q[index + 1])
        num_keys = starts_k[index + 1] - starts_k[index]
        assert queries.stop - queries.start <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        out[queries] = attend(
            q[queries],
            gathered(k, table, num_keys),
            gathered(v, table, num_keys),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
        )
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    assert block_table is not None
    assert cache_seqlens is not None
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    return torch.stack(
        [
            attend(
                queries,
                gathered(k_cache, table, length),
                gathered(v_cache, table, length),
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
            )
            for queries, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True)
        ]
    )


if find_spec("flash_attn") is None:
    library = ModuleType("flash_attn")
    library.__spec__ = ModuleSpec("flash_attn", None)
    library.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    library.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = library
