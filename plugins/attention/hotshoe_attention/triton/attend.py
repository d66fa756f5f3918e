"""The kernels that attend: queries of one KV head against pages that are read through the block
table, with the online softmax of FlashAttention (arXiv:2205.14135, 2307.08691).

The query heads of a group share the rows of a tile, so that a page is read once for all of them;
row r is token ``r // GROUP_SIZE``, head ``r % GROUP_SIZE`` of the group. Logits are scaled by
log2 e on top, since ``exp2`` is one instruction. Positions past the end of a sequence are read at
its last one: what lies behind it is undefined, may be NaN, and would survive a weight of zero.
"""

# M=rows of queries N=positions of a tile H=head_dim V=head_dim_v, padded to powers of two
# S=parts of a request R=rows that a part of a request has at most

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

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # finite, so that rows that see nothing give no NaN

_UNSTABLE = ["block_table", "query_start_loc", "seq_lens", "table_stride"]
"""Arguments that Triton must not compile variants for: slices begin anywhere, widths vary."""


@triton.jit(do_not_specialize=_UNSTABLE)
def attend_parts(
    q,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    out,
    sinks,
    block_table,
    query_start_loc,
    seq_lens,
    plan,
    partials,
    scale,
    softcap,
    q_token_stride,
    q_head_stride,
    table_stride,
    MAX_REQS: tl.constexpr,
    ARRIVALS_AT: tl.constexpr,
    PARTS_AT: tl.constexpr,
    STATES_AT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS_PER_LOAD: tl.constexpr,
):
    """Few query tokens of a request against a part of its positions; the last part to be done
    combines them (Flash-Decoding). Grid: KV heads times as many parts as there can be.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    part = tl.program_id(0) // NUM_KV_HEADS
    if part >= tl.load(plan + _NUM_PARTS):
        return
    request = tl.load(plan + PARTS_AT + part)
    first_part = tl.load(plan + _HEADER + _FIRST_PARTS * MAX_REQS + request)
    num_parts = tl.load(plan + _HEADER + _PARTS_OF * MAX_REQS + request)
    first_token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    seq_len = tl.load(seq_lens + request)
    first_position = seq_len - query_len
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(seq_len - begin, BLOCK_N)
    part_len = tl.cdiv(num_tiles, num_parts) * BLOCK_N
    begin += (part - first_part) * part_len
    end = tl.minimum(begin + part_len, seq_len)

    rows_M = tl.arange(0, BLOCK_M)
    is_row_M = rows_M < query_len * GROUP_SIZE
    heads_M = kv_head * GROUP_SIZE + rows_M % GROUP_SIZE
    tokens_M = (first_token + rows_M // GROUP_SIZE).to(tl.int64)
    positions_M = first_position + rows_M // GROUP_SIZE
    q_MH = _load_rows(
        q + tokens_M * q_token_stride + heads_M * q_head_stride, is_row_M, HEAD_DIM, PADDED_DIM
    )
    # a sink takes part in the softmax once, so in the first part
    most_M, sum_M = _start(sinks, heads_M, is_row_M, part == first_part, BLOCK_M)
    out_MV = tl.zeros([BLOCK_M, PADDED_DIM_V], tl.float32)
    most_M, sum_M, out_MV = _attend(
        q_MH,
        most_M,
        sum_M,
        out_MV,
        positions_M,
        begin,
        end,
        seq_len - 1,
        block_table + request.to(tl.int64) * table_stride,
        key_pages,
        value_pages,
        key_scales,
        value_scales,
        kv_head,
        scale,
        softcap,
        NUM_KV_HEADS,
        HEAD_DIM,
        HEAD_DIM_V,
        PADDED_DIM,
        PADDED_DIM_V,
        BLOCK_SIZE,
        WINDOW,
        BLOCK_N,
        True,
    )
    dims_V = tl.arange(0, PADDED_DIM_V)
    if num_parts == 1:
        _store_rows(
            out, out_MV, sum_M, tokens_M, heads_M, is_row_M, GROUP_SIZE * NUM_KV_HEADS, HEAD_DIM_V,
            PADDED_DIM_V,
        )  # fmt: skip
    else:
        states_M = (part.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + rows_M
        tl.store(
            partials + states_M[:, None] * PADDED_DIM_V + dims_V[None, :],
            out_MV,
            mask=is_row_M[:, None],
        )
        tl.store(partials + STATES_AT + states_M * 2, most_M, mask=is_row_M)
        tl.store(partials + STATES_AT + states_M * 2 + 1, sum_M, mask=is_row_M)
        # every thread has stored before one of them tells, and loads after one has been told
        tl.debug_barrier()
        arrivals = plan + ARRIVALS_AT + request * NUM_KV_HEADS + kv_head
        num_arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if num_arrived == num_parts - 1:
            _combine(
                out,
                partials,
                first_part,
                num_parts,
                first_token,
                query_len,
                kv_head,
                STATES_AT,
                GROUP_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM_V,
                PADDED_DIM_V,
                ROWS,
                PARTS_PER_LOAD,
            )


@triton.jit(do_not_specialize=_UNSTABLE)
def attend_tiles(
    q,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    out,
    sinks,
    block_table,
    query_start_loc,
    seq_lens,
    plan,
    scale,
    softcap,
    q_token_stride,
    q_head_stride,
    table_stride,
    MAX_REQS: tl.constexpr,
    TILES_AT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Tiles of a prompt's queries against all that they see. Grid: KV heads times as many tiles as
    there can be.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # the last tile of a prompt sees most: it starts first, and short ones fill the gaps
    tile = tl.load(plan + _NUM_TILES) - 1 - tl.program_id(0) // NUM_KV_HEADS
    if tile < 0:
        return
    request = tl.load(plan + TILES_AT + tile)
    tile -= tl.load(plan + _HEADER + _FIRST_TILES * MAX_REQS + request)
    first_token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    seq_len = tl.load(seq_lens + request)
    first_token += tile * TILE_TOKENS
    num_tokens = tl.minimum(query_len - tile * TILE_TOKENS, TILE_TOKENS)
    first_position = seq_len - query_len + tile * TILE_TOKENS

    rows_M = tl.arange(0, BLOCK_M)
    is_row_M = rows_M < num_tokens * GROUP_SIZE
    heads_M = kv_head * GROUP_SIZE + rows_M % GROUP_SIZE
    tokens_M = (first_token + rows_M // GROUP_SIZE).to(tl.int64)
    positions_M = first_position + rows_M // GROUP_SIZE
    q_MH = _load_rows(
        q + tokens_M * q_token_stride + heads_M * q_head_stride, is_row_M, HEAD_DIM, PADDED_DIM
    )
    most_M, sum_M = _start(sinks, heads_M, is_row_M, True, BLOCK_M)
    out_MV = tl.zeros([BLOCK_M, PADDED_DIM_V], tl.float32)

    end = first_position + num_tokens
    # every row sees all of the tiles of positions from here on ...
    whole_begin = 0
    # ... to here, and part of the others
    whole_end = (first_position + 1) // BLOCK_N * BLOCK_N
    table = block_table + request.to(tl.int64) * table_stride
    if WINDOW:
        begin = tl.maximum(first_position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        whole_begin = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        whole_end = tl.maximum(whole_end, begin)
        most_M, sum_M, out_MV = _attend(
            q_MH,
            most_M,
            sum_M,
            out_MV,
            positions_M,
            begin,
            tl.minimum(whole_begin, whole_end),
            seq_len - 1,
            table,
            key_pages,
            value_pages,
            key_scales,
            value_scales,
            kv_head,
            scale,
            softcap,
            NUM_KV_HEADS,
            HEAD_DIM,
            HEAD_DIM_V,
            PADDED_DIM,
            PADDED_DIM_V,
            BLOCK_SIZE,
            WINDOW,
            BLOCK_N,
            True,
        )
    most_M, sum_M, out_MV = _attend(
        q_MH,
        most_M,
        sum_M,
        out_MV,
        positions_M,
        whole_begin,
        whole_end,
        seq_len - 1,
        table,
        key_pages,
        value_pages,
        key_scales,
        value_scales,
        kv_head,
        scale,
        softcap,
        NUM_KV_HEADS,
        HEAD_DIM,
        HEAD_DIM_V,
        PADDED_DIM,
        PADDED_DIM_V,
        BLOCK_SIZE,
        WINDOW,
        BLOCK_N,
        False,
    )
    most_M, sum_M, out_MV = _attend(
        q_MH,
        most_M,
        sum_M,
        out_MV,
        positions_M,
        whole_end,
        end,
        seq_len - 1,
        table,
        key_pages,
        value_pages,
        key_scales,
        value_scales,
        kv_head,
        scale,
        softcap,
        NUM_KV_HEADS,
        HEAD_DIM,
        HEAD_DIM_V,
        PADDED_DIM,
        PADDED_DIM_V,
        BLOCK_SIZE,
        WINDOW,
        BLOCK_N,
        True,
    )
    _store_rows(
        out, out_MV, sum_M, tokens_M, heads_M, is_row_M, GROUP_SIZE * NUM_KV_HEADS, HEAD_DIM_V,
        PADDED_DIM_V,
    )  # fmt: skip


@triton.jit
def _attend(
    q_MH,
    most_M,
    sum_M,
    out_MV,
    positions_M,
    begin,
    end,
    last_position,
    table,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    kv_head,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take the tiles of positions from ``begin``, a multiple of theirs, to ``end`` into the
    softmax. Without a mask every row sees all of them.
    """
    places_N = tl.arange(0, BLOCK_N)
    dims_H = tl.arange(0, PADDED_DIM)
    dims_V = tl.arange(0, PADDED_DIM_V)
    factor = scale * _LOG2_E
    if softcap is not None:
        factor = softcap * _LOG2_E
    for start in tl.range(begin, end, BLOCK_N):
        positions_N = start + places_N
        held_N = positions_N
        if IS_MASKED:
            held_N = tl.minimum(positions_N, last_position)
        blocks_N = tl.load(table + held_N // BLOCK_SIZE).to(tl.int64)
        # [block, KV head, place in the block]: where a page's row begins, counted in rows
        rows_N = (blocks_N * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + held_N % BLOCK_SIZE
        at_NH = key_pages + rows_N[:, None] * HEAD_DIM + dims_H[None, :]
        if HEAD_DIM == PADDED_DIM:
            k_NH = tl.load(at_NH)
        else:
            k_NH = tl.load(at_NH, mask=(dims_H < HEAD_DIM)[None, :], other=0.0)
        logits_MN = tl.dot(q_MH, tl.trans(k_NH.to(q_MH.dtype)), input_precision="ieee")
        if key_scales is not None:
            logits_MN *= tl.load(key_scales + rows_N)[None, :]
        if softcap is not None:
            logits_MN = _tanh(logits_MN * (scale / softcap))
        if IS_MASKED:
            is_seen_MN = positions_N[None, :] <= positions_M[:, None]
            if WINDOW:
                is_seen_MN &= positions_N[None, :] > positions_M[:, None] - WINDOW
            logits_MN = tl.where(is_seen_MN, logits_MN, float("-inf"))
        new_most_M = tl.maximum(most_M, tl.max(logits_MN, 1) * factor)
        weights_MN = tl.exp2(logits_MN * factor - new_most_M[:, None])
        decay_M = tl.exp2(most_M - new_most_M)
        most_M = new_most_M
        sum_M = sum_M * decay_M + tl.sum(weights_MN, 1)
        at_NV = value_pages + rows_N[:, None] * HEAD_DIM_V + dims_V[None, :]
        if HEAD_DIM_V == PADDED_DIM_V:
            v_NV = tl.load(at_NV)
        else:
            v_NV = tl.load(at_NV, mask=(dims_V < HEAD_DIM_V)[None, :], other=0.0)
        if value_scales is not None:
            weights_MN *= tl.load(value_scales + rows_N)[None, :]
        out_MV = tl.dot(
            weights_MN.to(q_MH.dtype),
            v_NV.to(q_MH.dtype),
            out_MV * decay_M[:, None],
            input_precision="ieee",
        )
    return most_M, sum_M, out_MV


@triton.jit
def _combine(
    out,
    partials,
    first_part,
    num_parts,
    first_token,
    query_len,
    kv_head,
    STATES_AT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS_PER_LOAD: tl.constexpr,
):
    """Put the parts of a request together, many at a time: each load waits long."""
    rows_R = tl.arange(0, ROWS)
    is_row_R = rows_R < query_len * GROUP_SIZE
    dims_V = tl.arange(0, PADDED_DIM_V)
    most_R = tl.full([ROWS], _LOWEST, tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    out_RV = tl.zeros([ROWS, PADDED_DIM_V], tl.float32)
    for start in tl.range(0, num_parts, PARTS_PER_LOAD):
        parts_S = start + tl.arange(0, PARTS_PER_LOAD)
        is_state_SR = (parts_S < num_parts)[:, None] & is_row_R[None, :]
        states_S = ((first_part + parts_S).to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS
        states_SR = states_S[:, None] + rows_R[None, :]
        at_SR = partials + STATES_AT + states_SR * 2
        # past the first-level cache, which may hold what was there before
        part_most_SR = tl.load(at_SR, mask=is_state_SR, other=_LOWEST, cache_modifier=".cg")
        part_sum_SR = tl.load(at_SR + 1, mask=is_state_SR, other=0.0, cache_modifier=".cg")
        part_out_SRV = tl.load(
            partials + states_SR[:, :, None] * PADDED_DIM_V + dims_V[None, None, :],
            mask=is_state_SR[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_most_R = tl.maximum(most_R, tl.max(part_most_SR, 0))
        weights_SR = tl.exp2(part_most_SR - new_most_R[None, :])
        decay_R = tl.exp2(most_R - new_most_R)
        most_R = new_most_R
        sum_R = sum_R * decay_R + tl.sum(part_sum_SR * weights_SR, 0)
        out_RV = out_RV * decay_R[:, None] + tl.sum(part_out_SRV * weights_SR[:, :, None], 0)
    tokens_R = (first_token + rows_R // GROUP_SIZE).to(tl.int64)
    heads_R = kv_head * GROUP_SIZE + rows_R % GROUP_SIZE
    _store_rows(
        out, out_RV, sum_R, tokens_R, heads_R, is_row_R, GROUP_SIZE * NUM_KV_HEADS, HEAD_DIM_V,
        PADDED_DIM_V,
    )  # fmt: skip


@triton.jit
def _start(sinks, heads_M, is_row_M, takes_sinks, BLOCK_M: tl.constexpr):
    """Largest logit and sum of weights before the first position."""
    most_M = tl.full([BLOCK_M], _LOWEST, tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        is_taken_M = is_row_M & takes_sinks
        sinks_M = tl.load(sinks + heads_M, mask=is_taken_M, other=0.0)
        most_M = tl.where(is_taken_M, sinks_M * _LOG2_E, most_M)
        sum_M = tl.where(is_taken_M, 1.0, sum_M)
    return most_M, sum_M


@triton.jit
def _load_rows(rows_M, is_row_M, DIM: tl.constexpr, PADDED: tl.constexpr):
    dims_H = tl.arange(0, PADDED)
    mask = is_row_M[:, None]
    if DIM != PADDED:
        mask = mask & (dims_H < DIM)[None, :]
    return tl.load(rows_M[:, None] + dims_H[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(
    out,
    out_MV,
    sum_M,
    tokens_M,
    heads_M,
    is_row_M,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Divide by the sums, which rows that are none needn't have, and store."""
    dims_V = tl.arange(0, PADDED)
    mask = is_row_M[:, None]
    if DIM != PADDED:
        mask = mask & (dims_V < DIM)[None, :]
    out_MV = out_MV / tl.where(is_row_M, sum_M, 1.0)[:, None]
    at_M = out + (tokens_M * NUM_HEADS + heads_M) * DIM
    tl.store(at_M[:, None] + dims_V[None, :], out_MV.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tanh(x):
    """By exponentials that can't overflow; exact to float32's 1e-7, absolute."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)
