"""What native attention promises beyond being right: bits that the request alone decides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hotshoe.api import KernelsContext
from hotshoe.testing.attention_reference import LayerFacts, reference_attention
from hotshoe.testing.forward import allocate_cache
from hotshoe_kernels import cpu as cpu_kernels
from hotshoe_native.options import NativeOptions
from native.attention_pool import BLOCK_SIZE, Pool, build, make_spec


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Restores torch's number of threads, which the backend sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


VARIANTS = {
    "bfloat16": make_spec(),
    "float32": make_spec(dtype="float32"),
    "window": make_spec(window=70),
    "softcap-sinks": make_spec(softcap=5.0, has_sinks=True),
    "many-heads": make_spec(num_heads=14, num_kv_heads=2, head_dim=24),
    "int8": make_spec(kv_dtype="int8"),
    "int8-float32": make_spec(dtype="float32", kv_dtype="int8", window=70),
    "int8-many-heads": make_spec(
        num_heads=14, num_kv_heads=2, head_dim=30, kv_dtype="int8", softcap=5.0, has_sinks=True
    ),
}


def as_pages_keep(values: Tensor, kv_dtype: str) -> Tensor:
    """In float64; int8 pages round to 127 steps of the row's own size."""
    if kv_dtype != "int8":
        return values.double()
    largest = values.float().abs().amax(-1, keepdim=True)
    per_unit = torch.tensor(127.0) / largest
    return (values.float() * per_unit).round().double() * largest / 127


@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(isa: str, name: str) -> None:
    length = 600  # two segments
    pool = Pool(build(isa), VARIANTS[name])
    whole = pool.add(length, seed=1)
    pool.step([(whole, length)])
    for chunk in (7, 64, 257):
        cut = pool.add(length, seed=1)
        while cut.num_computed < length:
            pool.step([(cut, min(chunk, length - cut.num_computed))])
        assert torch.equal(cut.output, whole.output), f"chunks of {chunk}"
    single = pool.add(length, seed=1)
    pool.step([(single, length - 40)])
    for _ in range(40):
        pool.step([(single, 1)])
    assert torch.equal(single.output, whole.output)


@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_the_rest_of_the_batch(isa: str, name: str) -> None:
    backend = build(isa)
    alone, together = Pool(backend, VARIANTS[name]), Pool(backend, VARIANTS[name])
    expected, one = alone.add(200, seed=2), together.add(200, seed=2)
    others = [together.add(700, seed) for seed in (3, 4, 5)]
    together.step([(others[0], 513), (others[1], 1)])
    for count in (90, 1, 5, 33, 1):
        alone.step([(expected, count)])
        together.step([(others[1], 3), (one, count), (others[2], 40), (others[0], 1)])
    assert torch.equal(one.output, expected.output)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_the_number_of_threads(isa: str, name: str) -> None:
    outputs = []
    for num_threads in (1, 2, 3):
        pool = Pool(build(isa, num_threads=num_threads), VARIANTS[name])
        long, short = pool.add(1700, seed=6), pool.add(60, seed=7)
        # one long request alone is cut into segments that threads share
        for long_count, short_count in ((1500, 0), (1, 0), (3, 57), (1, 1), (120, 0)):
            members = [(long, long_count), (short, short_count)]
            pool.step([(one, count) for one, count in members if count])
        outputs.append(torch.cat((long.output, short.output)))
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_which_tokens_are_queries(
    isa: str, name: str, num_threads: int
) -> None:
    pool = Pool(build(isa, num_threads=num_threads), VARIANTS[name])
    steps = ((700, 60), (1, 1), (90, 300))
    expected = [pool.add(800, seed=6), pool.add(400, seed=7)]
    for counts in steps:
        pool.step(list(zip(expected, counts, strict=True)))
    one, other = pool.add(800, seed=6), pool.add(400, seed=7)
    for counts, num_queries in zip(steps, ((1, 4), (0, 1), (17, 0)), strict=True):
        pool.step(list(zip((one, other), counts, strict=True)), num_queries)
        for whole, some, count in zip(expected, (one, other), num_queries, strict=True):
            rows = whole.output[some.num_computed - count : some.num_computed]
            assert torch.equal(some.outputs[-1], rows)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_agree_with_the_reference(isa: str, seed: int, kv_dtype: str | None) -> None:
    choice = random.Random(seed)
    dtype = choice.choice(("float32", "bfloat16"))
    num_kv_heads = choice.choice((1, 2, 3))
    spec = make_spec(
        num_heads=num_kv_heads * choice.choice((1, 2, 3, 5, 11)),
        num_kv_heads=num_kv_heads,
        head_dim=choice.choice((8, 15, 40, 64, 72)),
        head_dim_v=choice.choice((None, None, 1, 24, 100)),
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=choice.choice((None, None, 1, 17, 130)),
        softcap=choice.choice((None, 3.0)),
        has_sinks=choice.random() < 0.3,
    )
    block_size = choice.choice((4, 12, 16, 48, 128) if kv_dtype else (2, 6, 16, 48, 128))
    pool = Pool(
        build(isa, block_size=block_size),
        spec,
        num_blocks=2400 // block_size,
        block_size=block_size,
    )
    requests = [pool.add(choice.choice((3, 40, 150, 580)), one) for one in range(4)]
    while unfinished := [one for one in requests if one.num_computed < len(one.q)]:
        members = choice.sample(unfinished, choice.randint(1, len(unfinished)))
        pool.step(
            [
                (one, min(choice.choice((1, 2, 9, 100, 400)), len(one.q) - one.num_computed))
                for one in members
            ]
        )
    for one in requests:
        keys, values = (as_pages_keep(each, spec.kv.dtype) for each in (one.k, one.v))
        expected = reference_attention(one.q, keys, values, pool.layer)
        tolerance = {"float32": 1e-3 if kv_dtype else 2e-5, "bfloat16": 3e-2}[dtype]
        torch.testing.assert_close(one.output.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("rotary_dim", [64, 40, 6])
def test_fused_rotation_gives_what_rotating_first_gives(
    isa: str, dtype: str, kv_dtype: str | None, rotary_dim: int
) -> None:
    spec = make_spec(num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
    context = KernelsContext(device=torch.device("cpu"), dtype=getattr(torch, dtype))
    kernels = cpu_kernels.build(NativeOptions(num_threads=1, isa="auto"), context)
    angles = torch.outer(torch.arange(64.0), 50.0 ** (-torch.arange(rotary_dim // 2) / 10))
    tables = (angles.cos(), angles.sin())
    outputs = []
    for is_fused in (True, False):
        backend = build(isa)
        pool = Pool(backend, spec)
        one = pool.add(50, seed=8)
        batch = pool.batch([(one, 50)])
        metadata = backend.build_metadata(batch, spec.kv)
        q, k = one.q, one.k
        if not is_fused:
            q, k = kernels.rope(q, k, batch.positions, *tables)
        layer = LayerFacts(spec, None, tables if is_fused else None)
        cache = allocate_cache(backend, spec, 256, torch.device("cpu"))
        outputs.append(backend.forward(layer, q, k, one.v, cache, metadata))
    tolerance = 1e-2 if dtype == "bfloat16" or kv_dtype else 1e-6
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=0)


def test_an_empty_half_of_a_pair_never_leaks(isa: str) -> None:
    """Pages hold two tokens of bfloat16 in a word; the second is NaN until it's written."""
    pool = Pool(build(isa), VARIANTS["bfloat16"])
    one = pool.add(40, seed=9)
    for _ in range(40):
        pool.step([(one, 1)])
    assert not one.output.isnan().any()


def test_weights_far_below_the_largest_count_with_int8_pages(isa: str) -> None:
    """One key has nearly all the weight, and a thousand others together as much as it."""
    spec = make_spec(num_heads=1, num_kv_heads=1, dtype="float32", kv_dtype="int8")
    pool = Pool(build(isa), spec)
    length = 1001
    one = pool.add(length, seed=12)
    one.q[:] = 0
    one.q[:, :, 0] = torch.tensor(float(length)).log() / spec.scale
    one.k[:, :, 0] = 0
    one.k[0, :, 0] = one.k[0].abs().max()
    one.q /= one.k[0, :, 0]
    one.v[1:] += 2
    pool.step([(one, length - 1)])
    pool.step([(one, 1)])
    keys, values = (as_pages_keep(each, "int8") for each in (one.k, one.v))
    expected = reference_attention(one.q, keys, values, pool.layer)
    assert 0.5 < expected[-1].mean() < 1.5
    torch.testing.assert_close(one.output.double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("exponent", [10, 19, 22, 24])
def test_equal_logits_give_equal_weights_however_large(
    isa: str, kv_dtype: str, exponent: int
) -> None:
    spec = make_spec(num_heads=1, num_kv_heads=1, head_dim=16, dtype="float32", kv_dtype=kv_dtype)
    pool = Pool(build(isa), spec)
    for seed in range(8):  # differently far from what float32 holds
        one = pool.add(70, seed)
        one.q[:], one.k[:], one.v[:] = 0, 0, 1
        one.q[:, :, 0] = (1 + seed / 12.7) * 2 ** (exponent / 2 + 1)
        one.k[:, :, 0] = 2 ** (exponent / 2)
        pool.step([(one, 70)])
        tolerance = 1e-2 if kv_dtype == "bfloat16" else 1e-4
        torch.testing.assert_close(one.output, one.v, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("place", "value"), [("k", torch.nan), ("v", torch.nan), ("v", torch.inf)])
def test_what_is_not_a_number_shows_in_all_that_see_it(
    isa: str, kv_dtype: str, place: str, value: float
) -> None:
    spec = make_spec(dtype="float32", kv_dtype=kv_dtype)
    pool = Pool(build(isa), spec)
    for at in (5, 6, 7, 8):  # on its own and in a whole word
        one = pool.add(40, seed=13)
        getattr(one, place)[at, 0, 3] = value
        for count in (at, 1, 33 - at, 6):
            pool.step([(one, count)])
        seen = one.output[at:, : spec.num_heads // 2]
        assert not seen.isfinite().all(-1).any()
        assert one.output[:at].isfinite().all()
        assert one.output[:, spec.num_heads // 2 :].isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_query_that_is_not_a_number_spoils_its_own_row(isa: str, kv_dtype: str) -> None:
    spec = make_spec(dtype="float32", kv_dtype=kv_dtype)
    pool = Pool(build(isa), spec)
    one = pool.add(40, seed=15)
    one.q[5, 1, 3] = torch.nan
    pool.step([(one, 40)])
    spoilt = ~one.output.isfinite().all(-1)
    assert spoilt.nonzero().tolist() == [[5, 1]]


def test_values_of_zero_and_tiny_ones_give_zero_with_int8_pages(isa: str) -> None:
    pool = Pool(build(isa), VARIANTS["int8"])
    one = pool.add(40, seed=14)
    for each in (one.q, one.k, one.v):
        each[:20] = 0
        each[20:] = 1e-38
    pool.step([(one, 33)])
    for _ in range(7):
        pool.step([(one, 1)])
    assert torch.equal(one.output, torch.zeros_like(one.output))


@pytest.mark.parametrize(
    ("kv_dtype", "block_size", "together"), [("bfloat16", 5, 2), ("int8", 5, 4), ("int8", 6, 4)]
)
def test_blocks_that_would_split_words_are_refused(
    kv_dtype: str, block_size: int, together: int
) -> None:
    assert build("auto", block_size=block_size).supports(make_spec(kv_dtype=kv_dtype)) == [
        f"block size {block_size} is not a multiple of {together}, the number of tokens that lie "
        f"together with KV dtype {kv_dtype!r}: raise cache.block_size"
    ]


def test_pages_of_a_type_that_is_not_offered_are_refused() -> None:
    assert build("auto").supports(make_spec(kv_dtype="float16")) == [
        "KV dtype 'float16' is not one of ('float32', 'bfloat16', 'int8'): change cache.dtype"
    ]


def test_int8_pages_take_a_byte_a_number_and_two_scales_a_token() -> None:
    layout = build("auto").layout(make_spec(head_dim=64, kv_dtype="int8"))
    assert layout.bytes_per_block == BLOCK_SIZE * 2 * (64 + 64 + 2 * 4)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_recording_follows_the_lengths_in_its_tensors(name: str) -> None:
    spec = VARIANTS[name]
    context = KernelsContext(device=torch.device("cpu"), dtype=torch.bfloat16)
    kernels = cpu_kernels.build(NativeOptions(num_threads=1, isa="auto"), context)
    backend = build("auto")
    expected, recorded = Pool(backend, spec), Pool(backend, spec)
    members = [[pool.add(600, seed) for seed in (10, 11)] for pool in (expected, recorded)]
    for pool, (short, long) in zip((expected, recorded), members, strict=True):
        pool.step([(short, 3), (long, 500)])
    step = [(one, 1) for one in members[1]]
    held = replace(recorded.batch(step), max_seq_len=600)
    q, k, v = recorded.inputs(step)
    metadata = backend.build_metadata(held, spec.kv)
    recording = kernels.record(
        lambda: (backend.forward(recorded.layer, q, k, v, recorded.cache, metadata),)
    )
    for _ in range(40):
        now = recorded.batch(step)
        for name in ("seq_lens", "slot_mapping", "positions"):
            getattr(held, name).copy_(getattr(now, name))
        for tensor, values in zip((q, k, v), recorded.inputs(step), strict=True):
            tensor.copy_(values)
        recording.replay()
        for row, one in enumerate(members[1]):
            one.outputs.append(recording.outputs[0][row : row + 1].clone())
            one.num_computed += 1
        expected.step([(one, 1) for one in members[0]])
    for one, other in zip(*members, strict=True):
        assert torch.equal(one.output, other.output)
