"""The kernel that draws a token of each row.

What top_k and top_p keep of a row is all above some logit, and the first few of those that equal
it. That boundary is searched for by counting, or by adding up weights, above several marks at once,
between bounds that close in on it; no row is sorted. Then the kept tokens race, as ``gumbel_max``
has it: first the blocks of ``DRAW_BLOCK`` token ids, then the tokens of the one that won.
"""

# N=BLOCK tokens of a row at once, M=marks that tokens are compared with at once

import triton
import triton.language as tl

from hotshoe.api import DRAW_BLOCK

BLOCK = 8192
NUM_WARPS = 16
ROOM = tl.constexpr(2048)
"""Logits that are gathered of each row."""

# A program waits for one block after the other, so they are large; where each token is compared
# with all marks, they have to be small, and are fetched some ahead.
_SEARCHED_BLOCK = tl.constexpr(2048)
_NUM_STAGES = tl.constexpr(4)

_DRAW_BLOCK = tl.constexpr(DRAW_BLOCK)
_NUM_MARKS = tl.constexpr(8)
_INFINITY = tl.constexpr(float("inf"))
_MASKED = tl.constexpr(-1e30)  # stands for -inf and NaN: what is computed with has to be finite
_LARGEST = tl.constexpr(1e30)
_COLDEST = tl.constexpr(1e-30)
_FIRST_BLOCK = tl.constexpr(2**32)  # as in gumbel_max: numbers of blocks, and SplitMix64
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def draw_rows(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    token_ids,
    rooms,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    """One program a row.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16; at least one of a row is finite.
        temperatures: ``[R]`` float32; 0 = the first of the largest logits.
        top_ks: ``[R]`` int64; 0 or more than V = all.
        top_ps: ``[R]`` float32 in (0, 1].
        min_ps: ``[R]`` float32.
        uniforms: ``[R]`` float64.
        token_ids: ``[R]`` int64, written.
        rooms: ``[R, ROOM]`` float32, written.
        vocab_size: V.
        row_stride: elements from a row of logits to the next.
        BLOCK: N, a multiple of the block of a draw.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    best, lowest = _ends(logits, vocab_size, BLOCK)
    if temperature == 0:
        token_id = _first_of(best, logits, vocab_size, BLOCK)
    else:
        temperature = tl.maximum(temperature, _COLDEST)
        boundary, last_equal = _boundary_of_filters(
            tl.load(top_ks + row),
            tl.load(top_ps + row).to(tl.float64),
            logits,
            vocab_size,
            best,
            lowest,
            temperature,
            rooms + row * ROOM,
            BLOCK,
        )
        token_id = _race(
            tl.load(uniforms + row),
            boundary,
            last_equal,
            tl.load(min_ps + row),
            logits,
            vocab_size,
            best,
            temperature,
            BLOCK,
        )
    tl.store(token_ids + row, token_id.to(tl.int64))


@triton.jit
def _load(logits, start, vocab_size, N: tl.constexpr):
    """``[N]`` logits and their token ids; past the end they are masked."""
    token_ids = start + tl.arange(0, N)
    is_token = token_ids < vocab_size
    values = tl.load(logits + token_ids, mask=is_token, other=-_INFINITY).to(tl.float32)
    return tl.minimum(tl.maximum(values, _MASKED), _LARGEST), token_ids


@triton.jit
def _weights_of(values, best, temperature):
    """Probabilities relative to the most probable token's."""
    weights = tl.exp((values - best) / temperature)
    return tl.where(values > _MASKED, weights, 0.0)


@triton.jit
def _ends(logits, vocab_size, BLOCK: tl.constexpr):
    """The largest logit of a row, and the smallest that isn't masked."""
    largest = tl.full((BLOCK,), -_INFINITY, tl.float32)
    smallest = tl.full((BLOCK,), _INFINITY, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values, _ = _load(logits, start, vocab_size, BLOCK)
        largest = tl.maximum(largest, values)
        smallest = tl.minimum(smallest, tl.where(values > _MASKED, values, _INFINITY))
    return tl.max(largest), tl.min(smallest)


@triton.jit
def _first_of(wanted, logits, vocab_size, BLOCK: tl.constexpr):
    """The first token that has a logit."""
    first = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values, token_ids = _load(logits, start, vocab_size, BLOCK)
        first = tl.minimum(first, tl.where(values == wanted, token_ids, 2**31 - 1))
    return tl.min(first)


@triton.jit
def _boundary_of_filters(
    top_k, top_p, logits, vocab_size, best, lowest, temperature, room, BLOCK: tl.constexpr
):
    """What top_k and top_p leave: the tokens above a logit, and of those that equal it the ones up
    to some id.
    """
    boundary, last_equal = lowest, vocab_size
    num_equal = tl.full((), 0.0, tl.float64)
    num_kept = num_equal  # of those that equal it
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if has_top_k:
        limit = top_k.to(tl.float64)
        boundary = _search(limit, logits, vocab_size, best, lowest, temperature, room, True, BLOCK)
    if has_top_k | (top_p < 1):
        num_above, mass, num_equal = _above(boundary, logits, vocab_size, best, temperature, BLOCK)
        weight = _weights_of(boundary, best, temperature).to(tl.float64)
        num_kept = num_equal
        if has_top_k:
            num_kept = tl.minimum(num_equal, top_k.to(tl.float64) - num_above)
        if top_p < 1:
            limit = top_p * (mass + num_kept * weight)
            nucleus = _search(
                limit, logits, vocab_size, best, boundary, temperature, room, False, BLOCK
            )
            if nucleus > boundary:
                boundary = nucleus
                _, mass, num_equal = _above(boundary, logits, vocab_size, best, temperature, BLOCK)
                weight = _weights_of(boundary, best, temperature).to(tl.float64)
                num_kept = num_equal
            # the last one kept is that with which the limit is reached
            num_wanted = tl.ceil((limit - mass) / tl.maximum(weight, 1e-300))
            num_kept = tl.minimum(num_kept, tl.maximum(num_wanted, 1.0))
    if num_kept < num_equal:
        last_equal = _id_of_equal(boundary, num_kept, logits, vocab_size, BLOCK)
    return boundary, last_equal


@triton.jit
def _search(
    limit,
    logits,
    vocab_size,
    best,
    lowest,
    temperature,
    room,
    IS_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest logit of a row such that the tokens above it have less than a limit.

    It's not below ``lowest``, which is a logit of the row, as ``best`` is. Once few are left that
    it can be, they are gathered in ``room``, and searched without the others.
    """
    highest = best
    above = tl.full((), -_INFINITY, tl.float32)  # the tokens above this have the limit or more
    beyond = tl.full((), 0.0, tl.float64)  # what the tokens above the highest have
    num_left = vocab_size
    while (lowest < highest) & (num_left > ROOM):
        marks = _marks(lowest, highest)
        sums = tl.zeros((_NUM_MARKS, _SEARCHED_BLOCK), tl.float32)
        for start in tl.range(0, vocab_size, _SEARCHED_BLOCK, num_stages=_NUM_STAGES):
            values, _ = _load(logits, start, vocab_size, _SEARCHED_BLOCK)
            parts = _parts(values, best, temperature, IS_COUNT)
            sums += tl.where(values[None, :] > marks[:, None], parts[None, :], 0.0)
        totals = tl.sum(sums.to(tl.float64), axis=1)
        above, below, beyond = _bounds(totals, limit, marks, above, highest, beyond)
        smallest, highest, num_left = _within(above, below, logits, vocab_size, BLOCK)
        # the first mark was the lower bound itself, so one of the two has moved
        lowest = tl.maximum(lowest, smallest)
    if lowest < highest:
        num_left = _gather(lowest, highest, logits, vocab_size, room, BLOCK)
        places = tl.arange(0, ROOM)
        values = tl.load(room + places, mask=places < num_left, other=_MASKED)
        parts = _parts(values, best, temperature, IS_COUNT)
        while lowest < highest:
            marks = _marks(lowest, highest)
            sums = tl.where(values[None, :] > marks[:, None], parts[None, :], 0.0)
            totals = beyond + tl.sum(sums.to(tl.float64), axis=1)
            above, below, _ = _bounds(totals, limit, marks, above, highest, beyond)
            smallest = tl.min(tl.where(values > above, values, _INFINITY))
            highest = tl.max(tl.where(values <= below, values, -_INFINITY))
            lowest = tl.maximum(lowest, smallest)
    return highest


@triton.jit
def _marks(lowest, highest):
    """``[M]`` logits, the lower bound first, and none that isn't below the higher one."""
    return lowest + (highest - lowest) * (tl.arange(0, _NUM_MARKS).to(tl.float32) / _NUM_MARKS)


@triton.jit
def _parts(values, best, temperature, IS_COUNT: tl.constexpr):
    """What each token adds: one, or its weight."""
    if IS_COUNT:
        return tl.where(values > _MASKED, 1.0, 0.0)
    return _weights_of(values, best, temperature)


@triton.jit
def _bounds(totals, limit, marks, above, highest, beyond):
    """The highest mark above which tokens have the limit, the lowest above which they haven't, and
    what they have above that.
    """
    has_limit = totals >= limit
    above = tl.maximum(above, tl.max(tl.where(has_limit, marks, -_INFINITY)))
    below = tl.minimum(highest, tl.min(tl.where(has_limit, _INFINITY, marks)))
    beyond = tl.maximum(beyond, tl.max(tl.where(has_limit, 0.0, totals)))
    return above, below, beyond


@triton.jit
def _within(above, below, logits, vocab_size, BLOCK: tl.constexpr):
    """The smallest logit above a bound, the largest that isn't above another, and how many tokens
    are between.
    """
    smallest = tl.full((BLOCK,), _INFINITY, tl.float32)
    largest = tl.full((BLOCK,), -_INFINITY, tl.float32)
    number = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values, _ = _load(logits, start, vocab_size, BLOCK)
        is_above, is_below = values > above, values <= below
        is_token = values > _MASKED
        smallest = tl.minimum(smallest, tl.where(is_token & is_above, values, _INFINITY))
        largest = tl.maximum(largest, tl.where(is_token & is_below, values, -_INFINITY))
        number += (is_token & is_above & is_below).to(tl.int32)
    return tl.min(smallest), tl.max(largest), tl.sum(number)


@triton.jit
def _gather(lowest, highest, logits, vocab_size, room, BLOCK: tl.constexpr):
    """Write the logits from one to another to ``room``; how many they are."""
    tl.debug_barrier()  # what was there before has been read
    number = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values, _ = _load(logits, start, vocab_size, BLOCK)
        is_between = (values >= lowest) & (values <= highest)
        counts = tl.cumsum(is_between.to(tl.int32), 0)
        tl.store(room + number + counts - 1, values, mask=is_between)
        number += tl.sum(is_between.to(tl.int32))
    tl.debug_barrier()  # other threads read what these have written
    return number


@triton.jit
def _above(boundary, logits, vocab_size, best, temperature, BLOCK: tl.constexpr):
    """How many tokens are above a logit, their weight, and how many equal it; float64."""
    above = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values, _ = _load(logits, start, vocab_size, BLOCK)
        is_above = values > boundary
        above += tl.where(is_above, 1.0, 0.0)
        equal += tl.where(values == boundary, 1.0, 0.0)
        mass += tl.where(is_above, _weights_of(values, best, temperature), 0.0)
    return (
        tl.sum(above.to(tl.float64)),
        tl.sum(mass.to(tl.float64)),
        tl.sum(equal.to(tl.float64)),
    )


@triton.jit
def _id_of_equal(boundary, number, logits, vocab_size, BLOCK: tl.constexpr):
    """The id of the so-manieth token that has a logit."""
    num_seen = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values, token_ids = _load(logits, start, vocab_size, BLOCK)
        is_equal = (values == boundary).to(tl.int32)
        places = num_seen + tl.cumsum(is_equal, 0)
        is_kept = (is_equal == 1) & (places <= number)
        last = tl.maximum(last, tl.max(tl.where(is_kept, token_ids, 0)))
        num_seen += tl.sum(is_equal)
    return last


@triton.jit
def _race(
    uniform,
    boundary,
    last_equal,
    min_p,
    logits,
    vocab_size,
    best,
    temperature,
    BLOCK: tl.constexpr,
):
    """The token that wins among those that are kept."""
    NUM_DRAW_BLOCKS: tl.constexpr = BLOCK // _DRAW_BLOCK
    key = _mixed((uniform * 2.0**53).to(tl.int64) + _GOLDEN)
    fastest = tl.full((NUM_DRAW_BLOCKS,), 1.0, tl.float64)
    winners = tl.zeros((NUM_DRAW_BLOCKS,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values, ids = _load(logits, start, vocab_size, BLOCK)
        weights = _kept(values, ids, boundary, last_equal, min_p, best, temperature)
        sums = tl.sum(tl.reshape(weights, (NUM_DRAW_BLOCKS, _DRAW_BLOCK)), axis=1)
        blocks = start // _DRAW_BLOCK + tl.arange(0, NUM_DRAW_BLOCKS)
        scores = _scores(sums, key, _FIRST_BLOCK + blocks.to(tl.int64))
        winners = tl.where(scores < fastest, blocks, winners)
        fastest = tl.minimum(scores, fastest)
    block = tl.min(tl.where(fastest == tl.min(fastest), winners, 2**31 - 1))
    values, ids = _load(logits, block * _DRAW_BLOCK, vocab_size, _DRAW_BLOCK)
    weights = _kept(values, ids, boundary, last_equal, min_p, best, temperature)
    scores = _scores(weights, key, ids.to(tl.int64))
    return tl.min(tl.where(scores == tl.min(scores), ids, 2**31 - 1))


@triton.jit
def _kept(values, token_ids, boundary, last_equal, min_p, best, temperature):
    """Weights, 0 for tokens that the filters drop."""
    weights = _weights_of(values, best, temperature)
    is_kept = (values > boundary) | ((values == boundary) & (token_ids <= last_equal))
    return tl.where(is_kept & (weights >= min_p), weights, 0.0)


@triton.jit
def _scores(weights, key, numbers):
    """When each arrives, below 0: the smallest is the first."""
    bits = (_mixed(key + numbers * _GOLDEN) >> 12) & (2**52 - 1)
    times = tl.log((bits.to(tl.float64) + 0.5) * 2.0**-52)
    return weights.to(tl.float64) / times


@triton.jit
def _mixed(values):
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _FACTOR_1
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _FACTOR_2
    return values ^ ((values >> 31) & (2**33 - 1))
