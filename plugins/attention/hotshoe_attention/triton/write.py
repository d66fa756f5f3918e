"""The kernel that comes first in a layer: it rotates queries and keys, writes keys and values into
the pages, and plans how the attention that follows is divided.

The plan depends on lengths that only the device knows when a recorded step runs again. A program of
this kernel makes it, beside those that write, because a launch of its own would take as long as all
of this.
"""

# T=tokens of a program R=their query heads H=half of the rotated dims D=the other dims
# V=head_dim_v, padded to powers of two

import triton
import triton.language as tl

from hotshoe_attention.triton.plan import (
    FIRST_PARTS,
    FIRST_TILES,
    HEADER,
    NUM_PARTS,
    NUM_TILES,
    PARTS_OF,
)

_HEADER = tl.constexpr(HEADER)
_NUM_PARTS = tl.constexpr(NUM_PARTS)
_NUM_TILES = tl.constexpr(NUM_TILES)
_FIRST_PARTS = tl.constexpr(FIRST_PARTS)
_PARTS_OF = tl.constexpr(PARTS_OF)
_FIRST_TILES = tl.constexpr(FIRST_TILES)

_REQS_PER_LOAD = tl.constexpr(128)
_ENTRIES_PER_STORE = tl.constexpr(64)

_UNSTABLE = [
    "positions",
    "slot_mapping",
    "query_start_loc",
    "seq_lens",
    "num_tokens",
    "num_reqs",
    "num_writers",
    "max_part_tokens",
]
"""Arguments that Triton must not compile variants for: slices begin anywhere, sizes vary."""


@triton.jit(do_not_specialize=_UNSTABLE)
def write_and_plan(
    q,
    k,
    v,
    out,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    cos,
    sin,
    positions,
    slot_mapping,
    query_start_loc,
    seq_lens,
    plan,
    num_tokens,
    num_reqs,
    num_writers,
    max_part_tokens,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HALF: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_REQS: tl.constexpr,
    ARRIVALS_AT: tl.constexpr,
    PARTS_AT: tl.constexpr,
    TILES_AT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MIN_PROGRAMS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    ENOUGH: tl.constexpr,
):
    """Grid: ``num_writers`` programs that write, one for some tokens of a KV head, and one for
    each request that plans.
    """
    program = tl.program_id(0)
    if program >= num_writers:
        _plan(
            program - num_writers,
            query_start_loc,
            seq_lens,
            plan,
            num_reqs,
            max_part_tokens,
            NUM_KV_HEADS,
            WINDOW,
            MAX_REQS,
            ARRIVALS_AT,
            PARTS_AT,
            TILES_AT,
            BLOCK_N,
            TILE_TOKENS,
            MIN_PROGRAMS,
            MAX_PROGRAMS,
            ENOUGH,
        )
        return
    kv_head = program % NUM_KV_HEADS
    first_token = program // NUM_KV_HEADS * BLOCK_T
    tokens_T = first_token + tl.arange(0, BLOCK_T)
    slots_T = tl.load(slot_mapping + tokens_T, mask=tokens_T < num_tokens, other=-1)
    is_kept_T = slots_T >= 0
    slots_T = tl.where(is_kept_T, slots_T, 0)
    pages_T = (slots_T // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slots_T % BLOCK_SIZE
    keys_T = k + tokens_T.to(tl.int64) * k_token_stride + kv_head * k_head_stride
    values_T = v + tokens_T.to(tl.int64) * v_token_stride + kv_head * v_head_stride

    rows_R = tl.arange(0, BLOCK_R)
    tokens_R = first_token + rows_R // GROUP_SIZE
    is_row_R = (rows_R < BLOCK_T * GROUP_SIZE) & (tokens_R < num_tokens)
    row_slots_R = tl.load(slot_mapping + tokens_R, mask=is_row_R, other=0)
    heads_R = kv_head * GROUP_SIZE + rows_R % GROUP_SIZE
    queries_R = q + tokens_R.to(tl.int64) * q_token_stride + heads_R * q_head_stride

    # all loads come before the first store, so that they wait together
    dims_V = tl.arange(0, PADDED_DIM_V)
    mask_TV = is_kept_T[:, None] & (dims_V < HEAD_DIM_V)[None, :]
    values_TV = tl.load(values_T[:, None] + dims_V[None, :], mask=mask_TV, other=0.0)
    dims_D = 2 * HALF + tl.arange(0, PADDED_REST)
    mask_TD = is_kept_T[:, None] & (dims_D < HEAD_DIM)[None, :]
    if 2 * HALF < HEAD_DIM:
        rest_TD = tl.load(keys_T[:, None] + dims_D[None, :], mask=mask_TD, other=0.0)
    if HALF:
        dims_H = tl.arange(0, PADDED_HALF)
        mask_TH = is_kept_T[:, None] & (dims_H < HALF)[None, :]
        first_TH, second_TH = _load_rotated(
            keys_T, cos, sin, positions + tokens_T, is_kept_T, mask_TH, dims_H, HALF
        )
        is_query_R = is_row_R & (row_slots_R >= 0)
        mask_RH = is_query_R[:, None] & (dims_H < HALF)[None, :]
        first_RH, second_RH = _load_rotated(
            queries_R, cos, sin, positions + tokens_R, is_query_R, mask_RH, dims_H, HALF
        )
        # the attention reads the queries from where they lie
        tl.store(queries_R[:, None] + dims_H[None, :], first_RH, mask=mask_RH)
        tl.store(queries_R[:, None] + HALF + dims_H[None, :], second_RH, mask=mask_RH)

    kind = key_pages.dtype.element_ty
    if key_scales is not None:
        largest_T = tl.zeros([BLOCK_T], tl.float32)
        if HALF:
            largest_T = _larger(_largest(first_TH), _largest(second_TH))
        if 2 * HALF < HEAD_DIM:
            largest_T = _larger(largest_T, _largest(rest_TD))
        key_scales_T = _scales(largest_T)
        value_scales_T = _scales(_largest(values_TV))
        tl.store(key_scales + pages_T, key_scales_T, mask=is_kept_T)
        tl.store(value_scales + pages_T, value_scales_T, mask=is_kept_T)
        if HALF:
            first_TH = _quantized(first_TH, key_scales_T)
            second_TH = _quantized(second_TH, key_scales_T)
        if 2 * HALF < HEAD_DIM:
            rest_TD = _quantized(rest_TD, key_scales_T)
        values_TV = _quantized(values_TV, value_scales_T)
    key_pages_T = key_pages + pages_T * HEAD_DIM
    if HALF:
        tl.store(key_pages_T[:, None] + dims_H[None, :], first_TH.to(kind), mask=mask_TH)
        tl.store(key_pages_T[:, None] + HALF + dims_H[None, :], second_TH.to(kind), mask=mask_TH)
    if 2 * HALF < HEAD_DIM:
        tl.store(key_pages_T[:, None] + dims_D[None, :], rest_TD.to(kind), mask=mask_TD)
    value_pages_T = value_pages + pages_T * HEAD_DIM_V
    tl.store(value_pages_T[:, None] + dims_V[None, :], values_TV.to(kind), mask=mask_TV)

    # no request attends for padding
    mask_RV = (is_row_R & (row_slots_R < 0))[:, None] & (dims_V < HEAD_DIM_V)[None, :]
    out_R = out + (tokens_R.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads_R) * HEAD_DIM_V
    zeros_RV = tl.zeros([BLOCK_R, PADDED_DIM_V], out.dtype.element_ty)
    tl.store(out_R[:, None] + dims_V[None, :], zeros_RV, mask=mask_RV)


@triton.jit
def _load_rotated(
    rows_T, cos, sin, positions_T, is_row_T, mask_TH, dims_H, HALF: tl.constexpr
):  # fmt: skip
    """Both halves rotated, in the dtype that they had (arXiv:2104.09864)."""
    first_TH = tl.load(rows_T[:, None] + dims_H[None, :], mask=mask_TH, other=0.0)
    second_TH = tl.load(rows_T[:, None] + HALF + dims_H[None, :], mask=mask_TH, other=0.0)
    angles_T = tl.load(positions_T, mask=is_row_T, other=0) * HALF
    cos_TH = tl.load(cos + angles_T[:, None] + dims_H[None, :], mask=mask_TH, other=0.0)
    sin_TH = tl.load(sin + angles_T[:, None] + dims_H[None, :], mask=mask_TH, other=0.0)
    kind = first_TH.dtype
    first_TH = first_TH.to(tl.float32)
    second_TH = second_TH.to(tl.float32)
    rotated_TH = first_TH * cos_TH - second_TH * sin_TH
    return rotated_TH.to(kind), (second_TH * cos_TH + first_TH * sin_TH).to(kind)


@triton.jit
def _largest(values_TD):
    """NaN where one isn't a number, which int8 can't tell: the sum knows, the largest may not."""
    values_TD = values_TD.to(tl.float32)
    sum_T = tl.sum(values_TD, 1)
    return tl.where(sum_T == sum_T, tl.max(tl.abs(values_TD), 1), sum_T)


@triton.jit
def _larger(one_T, other_T):
    return tl.maximum(one_T, other_T, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scales(largest_T):
    """What the largest value of a row is divided by to become the largest of int8."""
    return tl.where(largest_T == 0, 1.0, largest_T / 127.0)


@triton.jit
def _quantized(values_TD, scales_T):
    return tl.floor(values_TD.to(tl.float32) / scales_T[:, None] + 0.5)


@triton.jit
def _plan(
    request,
    query_start_loc,
    seq_lens,
    plan,
    num_reqs,
    max_part_tokens,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_REQS: tl.constexpr,
    ARRIVALS_AT: tl.constexpr,
    PARTS_AT: tl.constexpr,
    TILES_AT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MIN_PROGRAMS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    ENOUGH: tl.constexpr,
):
    """Write what the programs of one request are: its parts or its tiles follow those of the
    requests before it, which each program counts for itself.
    """
    num_spans = 0
    for start in range(0, num_reqs, _REQS_PER_LOAD):
        _, spans = _work(
            start, query_start_loc, seq_lens, num_reqs, max_part_tokens, WINDOW, BLOCK_N,
            TILE_TOKENS,
        )  # fmt: skip
        num_spans += tl.sum(spans)
    # enough for every processor, or parts that are worth their combination, but never so many that
    # combining takes longer than it saves
    part_spans = tl.minimum(tl.cdiv(num_spans, MIN_PROGRAMS), ENOUGH)
    part_spans = tl.maximum(tl.maximum(part_spans, tl.cdiv(num_spans, MAX_PROGRAMS)), 2)
    first_part = 0
    first_tile = 0
    num_parts = 0
    num_tiles = 0
    own_parts = 0
    own_tiles = 0
    for start in range(0, num_reqs, _REQS_PER_LOAD):
        tiles, spans = _work(
            start, query_start_loc, seq_lens, num_reqs, max_part_tokens, WINDOW, BLOCK_N,
            TILE_TOKENS,
        )  # fmt: skip
        parts = tl.cdiv(spans, part_spans)
        requests = start + tl.arange(0, _REQS_PER_LOAD)
        num_parts += tl.sum(parts)
        num_tiles += tl.sum(tiles)
        first_part += tl.sum(tl.where(requests < request, parts, 0))
        first_tile += tl.sum(tl.where(requests < request, tiles, 0))
        own_parts += tl.sum(tl.where(requests == request, parts, 0))
        own_tiles += tl.sum(tl.where(requests == request, tiles, 0))
    if request == 0:
        tl.store(plan + _NUM_PARTS, num_parts)
        tl.store(plan + _NUM_TILES, num_tiles)
    tl.store(plan + _HEADER + _FIRST_PARTS * MAX_REQS + request, first_part)
    tl.store(plan + _HEADER + _PARTS_OF * MAX_REQS + request, own_parts)
    tl.store(plan + _HEADER + _FIRST_TILES * MAX_REQS + request, first_tile)
    entries = tl.arange(0, _ENTRIES_PER_STORE)
    for start in range(0, own_parts, _ENTRIES_PER_STORE):
        at = plan + PARTS_AT + first_part + start + entries
        tl.store(at, request, mask=start + entries < own_parts)
    for start in range(0, own_tiles, _ENTRIES_PER_STORE):
        at = plan + TILES_AT + first_tile + start + entries
        tl.store(at, request, mask=start + entries < own_tiles)
    for start in range(0, NUM_KV_HEADS, _ENTRIES_PER_STORE):
        at = plan + ARRIVALS_AT + request * NUM_KV_HEADS + start + entries
        tl.store(at, 0, mask=start + entries < NUM_KV_HEADS)


@triton.jit
def _work(
    start,
    query_start_loc,
    seq_lens,
    num_reqs,
    max_part_tokens,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Tiles of queries of requests that have many, spans of positions that the others attend to."""
    requests = start + tl.arange(0, _REQS_PER_LOAD)
    is_request = requests < num_reqs
    begins = tl.load(query_start_loc + requests, mask=is_request, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=is_request, other=0) - begins
    lens = tl.load(seq_lens + requests, mask=is_request, other=0)
    query_lens = tl.where(lens > 0, query_lens, 0)
    begins = tl.zeros_like(lens)
    if WINDOW:
        begins = tl.maximum(lens - query_lens + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    is_part = (query_lens > 0) & (query_lens <= max_part_tokens)
    spans = tl.where(is_part, tl.cdiv(lens - begins, BLOCK_N), 0)
    tiles = tl.where(query_lens > max_part_tokens, tl.cdiv(query_lens, TILE_TOKENS), 0)
    return tiles, spans
