"""Dense weights: merged in place, complete, of the right shape, or refused."""

from __future__ import annotations

import pytest
import torch

from hotshoe.api import LinearSpec, QuantizationContext, WeightBuilder
from hotshoe.errors import ModelLoadError
from hotshoe.testing.forward import DenseTensor
from hotshoe_quantization import none

CPU = torch.device("cpu")


def make_builder(*, has_bias: bool = False, dtype: torch.dtype = torch.float32) -> WeightBuilder:
    component = none.hotshoe_component()
    quantization = component.factory(
        component.options(), QuantizationContext(device=CPU, dtype=dtype)
    )
    spec = LinearSpec(
        name="block.qkv",
        in_features=5,
        parts=(("q", 4), ("k", 2)),
        has_bias=has_bias,
        dtype=dtype,
        device=CPU,
    )
    return quantization.builder(spec)  # type: ignore[attr-defined]  # the factory's type is object


def test_parts_are_merged_by_rows_in_the_models_dtype_whatever_the_order() -> None:
    builder = make_builder(has_bias=True, dtype=torch.bfloat16)
    q, k, q_bias, k_bias = (torch.randn(shape) for shape in ((4, 5), (2, 5), (4,), (2,)))

    builder.load("k", DenseTensor("k.weight", k))
    builder.load("q", DenseTensor("q.bias", q_bias), is_bias=True)
    builder.load("q", DenseTensor("q.weight", q))
    builder.load("k", DenseTensor("k.bias", k_bias), is_bias=True)
    weight = builder.finalize()

    assert (weight.format, weight.out_features, weight.in_features) == ("dense", 6, 5)
    assert torch.equal(weight.tensors["weight"], torch.cat((q, k)).bfloat16())
    assert torch.equal(weight.tensors["bias"], torch.cat((q_bias, k_bias)).bfloat16())


@pytest.mark.parametrize(
    ("part", "shape", "is_bias", "message"),
    [
        ("q", (4, 6), False, r"'t' has shape \(4, 6\), but 'q' of 'block.qkv' needs \(4, 5\)"),
        ("k", (4, 5), False, r"needs \(2, 5\)"),
        ("v", (2, 5), False, r"no part 'v' for tensor 't'; parts: \['q', 'k'\]"),
        ("q", (4,), True, "declared without a bias"),
    ],
)
def test_what_does_not_fit_is_refused(
    part: str, shape: tuple[int, ...], is_bias: bool, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        make_builder().load(part, DenseTensor("t", torch.zeros(shape)), is_bias=is_bias)


def test_missing_parts_are_named() -> None:
    builder = make_builder(has_bias=True)
    builder.load("q", DenseTensor("q.weight", torch.zeros(4, 5)))
    builder.load("k", DenseTensor("k.bias", torch.zeros(2)), is_bias=True)
    with pytest.raises(ModelLoadError, match=r"no bias of 'q', weight of 'k'"):
        builder.finalize()


def test_a_part_that_comes_twice_is_refused() -> None:
    builder = make_builder()
    builder.load("q", DenseTensor("one", torch.zeros(4, 5)))
    with pytest.raises(ModelLoadError, match=r"'two': weight of 'q' in 'block.qkv' came twice"):
        builder.load("q", DenseTensor("two", torch.zeros(4, 5)))
