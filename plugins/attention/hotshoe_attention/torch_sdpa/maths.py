"""Attention over gathered keys and values, with everything that a spec may ask for."""

# B=requests in a group T=queries of one request L=positions N=num_heads K=num_kv_heads G=N/K
# H=head_dim V=head_dim_v M=B*K

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hotshoe.api import AttentionSpec
from hotshoe_attention.torch_sdpa.metadata import Chunk, SingleTokenGroup

# largest number of logits that the path without SDPA holds at once
MAX_LOGITS = 1 << 24


def attend_single(
    q_BNH: Tensor,
    group: SingleTokenGroup,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: AttentionSpec,
    sinks_N: Tensor | None,
) -> Tensor:
    """One query token per request against its padded history: ``[B, N, V]``, contiguous."""
    num_reqs, num_kv_heads = q_BNH.shape[0], spec.kv.num_kv_heads
    shape = (num_reqs * num_kv_heads, -1)
    keys = k_cache.flatten(0, 1).index_select(0, group.heads).to(q_BNH.dtype)
    values = v_cache.flatten(0, 1).index_select(0, group.heads).to(q_BNH.dtype)
    k_MLH, v_MLV = keys.view(*shape, keys.shape[1]), values.view(*shape, values.shape[1])
    q_MGH = q_BNH.reshape(*shape, q_BNH.shape[2])
    logits_MGL = torch.bmm(q_MGH, k_MLH.transpose(1, 2))
    logits = logits_MGL.view(num_reqs, num_kv_heads, *logits_MGL.shape[1:])
    if spec.softcap is None:
        logits = torch.add(group.bias, logits, alpha=spec.scale)
    else:
        logits = _capped(logits.float() * spec.scale, spec.softcap) + group.bias
    sinks = None if sinks_N is None else sinks_N.view(1, num_kv_heads, -1, 1)
    weights = _softmax(logits, sinks).to(q_BNH.dtype)
    out_MGV = torch.bmm(weights.view(logits_MGL.shape), v_MLV)
    return out_MGV.view(num_reqs, spec.num_heads, -1)


def attend_chunk(
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKV: Tensor,
    chunk: Chunk,
    spec: AttentionSpec,
    sinks_N: Tensor | None,
) -> Tensor:
    """One request's query tokens against its history: ``[T, N, V]``."""
    q_NTH, k_KLH, v_KLV = q_TNH.transpose(0, 1), k_LKH.transpose(0, 1), v_LKV.transpose(0, 1)
    if spec.softcap is None and sinks_N is None:
        out_NTV = F.scaled_dot_product_attention(
            q_NTH.unsqueeze(0),
            k_KLH.unsqueeze(0),
            v_KLV.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.kv.num_kv_heads,
        )[0]
    else:
        out_NTV = _attend_spelt_out(q_NTH, k_KLH, v_KLV, chunk, spec, sinks_N)
    return out_NTV.transpose(0, 1)


def _attend_spelt_out(
    q_NTH: Tensor,
    k_KLH: Tensor,
    v_KLV: Tensor,
    chunk: Chunk,
    spec: AttentionSpec,
    sinks_N: Tensor | None,
) -> Tensor:
    """What SDPA has no argument for, a few queries at a time to bound the memory."""
    num_queries, num_positions = q_NTH.shape[1], k_KLH.shape[1]
    mask = chunk.mask
    if mask is None:
        mask = torch.ones(num_queries, num_positions, dtype=torch.bool, device=q_NTH.device).tril()
    q_KGTH = q_NTH.view(spec.kv.num_kv_heads, -1, *q_NTH.shape[1:])
    sinks = None if sinks_N is None else sinks_N.view(spec.kv.num_kv_heads, -1, 1, 1)
    stride = max(1, MAX_LOGITS // (spec.num_heads * num_positions))
    outputs = []
    for begin in range(0, num_queries, stride):
        queries = q_KGTH[:, :, begin : begin + stride]
        logits = torch.matmul(queries, k_KLH.unsqueeze(1).transpose(2, 3)).float() * spec.scale
        if spec.softcap is not None:
            logits = _capped(logits, spec.softcap)
        logits.masked_fill_(~mask[begin : begin + stride], float("-inf"))
        weights = _softmax(logits, sinks).to(q_NTH.dtype)
        outputs.append(torch.matmul(weights, v_KLV.unsqueeze(1)))
    return torch.cat(outputs, 2).flatten(0, 1)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return logits.div_(softcap).tanh_().mul_(softcap)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension; a sink takes part in the sum and has no value."""
    if sinks is None:
        return torch.softmax(logits, -1)
    column = sinks.expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat((logits, column), -1), -1)[..., :-1]
