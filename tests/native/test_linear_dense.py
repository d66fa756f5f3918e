"""``linear`` and ``embedding`` with dense weights: float64 arithmetic, the same bits in any batch
and on any number of threads, and nothing read or written but what the arguments say.
"""

# M=rows of x N=out_features K=in_features

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from hotshoe_native.linear import (
    DTYPES,
    EmbeddingArgs,
    LinearArgs,
    PackedWeight,
    pack_dense,
)
from hotshoe_native.ops import NativeLibrary
from hotshoe_native.weight_arena import WeightArena

SENTINEL = 7.0
NUM_CASES = 25


def packed(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedWeight:
    arena = WeightArena()
    pairs = zip(weights, biases, strict=True)
    return PackedWeight([pack_dense(weight, bias, arena) for weight, bias in pairs])


def surrounded(x_MK: Tensor, value: float) -> Tensor:
    """A view that equals the tensor, amid memory that is full of a value."""
    m, k = x_MK.shape
    memory = torch.full((m + 2, k + 37), value, dtype=x_MK.dtype)
    view = memory[1:-1, 17 : 17 + k]
    view.copy_(x_MK)
    return view


def linear(
    library: NativeLibrary,
    weight: PackedWeight,
    x_MK: Tensor,
    num_threads: int = 1,
    y_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run the op on strided rows, and look that it takes x and y for no larger than they are."""
    x = surrounded(x_MK, float("nan"))
    y = surrounded(torch.zeros(len(x_MK), weight.out_features, dtype=y_dtype or x.dtype), SENTINEL)
    args = LinearArgs(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        y=y.data_ptr(),
        y_stride=y.stride(0),
        m=len(x),
        dtype=DTYPES[x.dtype],
        y_dtype=DTYPES[y.dtype],
        weight=weight.address,
    )
    library.op("linear")(args, num_threads)
    result = y.clone()
    y.fill_(SENTINEL)
    assert y._base is not None
    assert (y._base == SENTINEL).all()
    return result


def random_sizes(rng: random.Random) -> tuple[int, list[int], int]:
    """M, the N of each part, and K: round numbers and others."""
    m = rng.choice([1, 1, 2, 3, 4, 7, 8, 9, 16, 25, rng.randint(1, 150)])
    ns = [
        rng.choice([1, 31, 32, 33, 64, 128, rng.randint(1, 300)])
        for _ in range(rng.choice([1, 1, 2, 4]))
    ]
    return m, ns, rng.choice([1, 2, 3, 32, 63, 64, 65, rng.randint(1, 700)])


def test_random_layers_equal_float64(library: NativeLibrary, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(NUM_CASES):
        m, ns, k = random_sizes(rng)
        weights = [torch.randn(n, k).to(dtype) for n in ns]
        biases = [torch.randn(n) if rng.random() < 0.5 else None for n in ns]
        x = torch.randn(m, k).to(dtype)

        y = linear(library, packed(weights, biases), x, rng.choice([1, 2, 3]))

        exact = x.double() @ torch.cat(weights).double().T
        exact += torch.cat(
            [torch.zeros(n) if b is None else b for n, b in zip(ns, biases, strict=True)]
        )
        sizes = x.double().abs() @ torch.cat(weights).double().abs().T
        # half a unit in the last place, and the noise of sums in float32
        allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * (sizes + 1)
        assert ((y.double() - exact).abs() <= allowed).all(), (m, ns, k)


def test_a_row_gives_the_same_bits_in_any_batch_and_on_any_threads(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(NUM_CASES):
        _, ns, k = random_sizes(rng)
        weight = packed([torch.randn(n, k).to(dtype) for n in ns], [torch.randn(n) for n in ns])
        x = torch.randn(90, k).to(dtype)
        whole = linear(library, weight, x)
        for num_threads in (1, 2, 5):
            begin = rng.randrange(80)
            end = begin + rng.choice([1, 1, 2, 3, 5, 8, 10])
            part = linear(library, weight, x[begin:end], num_threads)
            assert torch.equal(part, whole[begin:end]), (ns, k, begin, end, num_threads)
            assert torch.equal(linear(library, weight, x, num_threads), whole), (ns, k)


def test_results_of_bfloat16_need_not_be_rounded(library: NativeLibrary) -> None:
    rng = random.Random(5)
    torch.manual_seed(5)
    for _ in range(NUM_CASES):
        m, ns, k = random_sizes(rng)
        weights = [torch.randn(n, k).bfloat16() for n in ns]
        weight = packed(weights, [torch.randn(n) for n in ns])
        x = torch.randn(m, k).bfloat16()
        exact = linear(library, weight, x, rng.choice([1, 2]), torch.float32)
        assert torch.equal(exact.bfloat16(), linear(library, weight, x))
        assert not torch.equal(exact, exact.bfloat16().float())


def test_many_rows_are_taken_in_blocks(library: NativeLibrary, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    k = 3000  # a row takes so much of a cache that blocks are short
    weights = [torch.randn(40, k).to(dtype)]
    x = torch.randn(300, k).to(dtype)
    y = linear(library, packed(weights, [None]), x)
    assert torch.equal(y[250:260], linear(library, packed(weights, [None]), x[250:260]))
    expected = x.double() @ weights[0].double().T
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-3)


def test_rows_that_threads_have_for_themselves_have_the_same_bits(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    torch.manual_seed(6)
    weight = packed([torch.randn(n, 37).to(dtype) for n in (33, 40)], [torch.randn(33), None])
    x = torch.randn(800, 37).to(dtype)
    few = torch.cat([linear(library, weight, x[i : i + 100]) for i in range(0, 800, 100)])
    for num_threads in (1, 2, 3, 4):
        assert torch.equal(linear(library, weight, x, num_threads), few)


def test_values_that_are_not_numbers_stay_in_their_row(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    weight = packed([torch.randn(70, 65).to(dtype)], [None])
    x = torch.randn(11, 65).to(dtype)
    before = linear(library, weight, x)
    x[4, 64], x[7, 0] = float("nan"), float("inf")
    after = linear(library, weight, x)
    assert after[4].isnan().all()
    assert not after[7].isfinite().any()
    healthy = [row for row in range(11) if row not in (4, 7)]
    assert torch.equal(after[healthy], before[healthy])


def test_embedding_gathers_rows_of_all_parts(library: NativeLibrary, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    for k in (1, 2, 31, 64, 65):
        weights = [torch.randn(n, k).to(dtype) for n in (33, 1, 64)]
        table, weight = torch.cat(weights), packed(weights, [None] * 3)
        token_ids = torch.randint(0, len(table), (50,))
        for num_threads in (1, 3):
            memory = torch.full((52, k), SENTINEL, dtype=dtype)
            args = EmbeddingArgs(
                token_ids=token_ids.data_ptr(),
                out=memory[1].data_ptr(),
                num_tokens=50,
                dtype=DTYPES[dtype],
                weight=weight.address,
            )
            library.op("embedding")(args, num_threads)
            assert torch.equal(memory[1:-1], table[token_ids])
            assert (memory[[0, -1]] == SENTINEL).all()


def test_packed_weights_are_aligned_and_padded_with_zeros() -> None:
    arena = WeightArena()
    parts = [pack_dense(torch.ones(n, 5).to(torch.bfloat16), None, arena) for n in (1, 33, 700)]
    for part, num_panels in zip(parts, (1, 2, 22), strict=True):
        assert part.panels.data_ptr() % 64 == 0
        assert part.panels.numel() == num_panels * 3 * 128
        ones = part.panels.view(torch.bfloat16)
        assert ones.sum() == part.out_features * 5


def test_a_weight_outlives_its_arena(library: NativeLibrary) -> None:
    values = torch.randn(3000, 3000)  # more than a chunk
    small = torch.randn(4, 3000)
    weight = packed([values, small], [None, None])
    x = torch.randn(1, 3000)
    expected = x @ torch.cat((values, small)).T
    del values, small
    torch.testing.assert_close(linear(library, weight, x), expected, rtol=1e-4, atol=1e-3)
