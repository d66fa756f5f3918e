"""Native attention where logits lie far from those that a row saw first, which its weights are
relative to.
"""

# L=positions

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotshoe.api import AttentionSpec
from hotshoe.testing.attention_reference import TOLERANCES, reference_attention
from native.attention_pool import Pool, Request, build, make_spec

LENGTH = 600  # two segments
POSITIONS = torch.arange(float(LENGTH))
RUNS = POSITIONS // 64
DTYPES = ("float32", "bfloat16")

LOGITS = {
    **{
        f"{above} above": torch.where((RUNS > 0) & (POSITIONS % 11 < 4), above, 0)
        for above in (55, 58, 59, 60, 61, 65, 126, 140, 300)
    },
    "one key above": torch.where(POSITIONS == 150, 400, 0),
    "a run above": torch.where(RUNS == 2, 90, 0),
    "above in the second segment": torch.where(POSITIONS > 580, 200, 0),
    "rising by 25": 25 * RUNS,
    "rising by 70": 70 * RUNS,
    "rising by 500": 500 * RUNS,
    "rising with every key": POSITIONS,
    "falling": -200 * RUNS,
    "falling far": torch.where(RUNS > 0, -10_000, 0),
    "far below, then less": torch.where(RUNS > 0, -240, -300),
    "huge": 100_000 * (1 - (POSITIONS + 60) // 70 % 3),
}
"""To base 2, of the rows that are no ordinary ones."""

VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "window": {"window": 100},
    "sinks": {"window": 100, "has_sinks": True},
}


def spec_of(dtype: str, num_heads: int = 5, variant: str = "whole") -> AttentionSpec:
    return make_spec(num_heads=num_heads, num_kv_heads=1, dtype=dtype, **VARIANTS[variant])


def add(pool: Pool, logits_L: Tensor) -> Request:
    """A request of which one row in ten has about these logits, and the others ordinary ones."""
    one = pool.add(LENGTH, seed=1)
    one.q[:, :, 0] = 0
    one.q[::2, 1::5, 0] = 16
    one.k[:, 0, 0] = logits_L * math.log(2) / (16 * pool.layer.spec.scale)
    return one


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LOGITS)
def test_rows_with_outliers_and_those_beside_them_agree_with_the_reference(
    isa: str, name: str, variant: str, dtype: str
) -> None:
    pool = Pool(build(isa), spec_of(dtype, variant=variant))
    one = add(pool, LOGITS[name])
    for count in (150, LENGTH - 160, *[1] * 10):
        pool.step([(one, count)])
    expected = reference_attention(one.q, one.k, one.v, pool.layer)
    # a logit of float32 has its own steps
    tolerance = TOLERANCES[dtype] + 1e-6 * float(LOGITS[name].abs().max())
    torch.testing.assert_close(one.output.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name", ["61 above", "300 above", "rising by 25", "rising by 70", "falling"]
)
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    isa: str, name: str, variant: str, dtype: str
) -> None:
    backend = build(isa)
    together = Pool(backend, spec_of(dtype, variant=variant))
    whole = add(together, LOGITS[name])
    together.step([(whole, LENGTH)])
    layer = together.layer
    pool = Pool(backend, spec_of(dtype, 1, variant))
    for head in (1, 2):  # with and without outliers
        sinks = None if layer.sinks is None else layer.sinks[head : head + 1].clone()
        pool.layer = replace(pool.layer, sinks=sinks)
        one = pool.add(LENGTH, seed=1)
        one.q, one.k, one.v = whole.q[:, head : head + 1], whole.k, whole.v
        for begin in (100, 300, 500, 560):
            pool.step([(one, begin - one.num_computed)])
            for _ in range(10):
                pool.step([(one, 1)])
                at = one.num_computed - 1
                assert torch.equal(one.outputs[-1][0, 0], whole.output[at, head]), at


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [150, 200, 1000, 10_000, 100_000])
def test_keys_far_below_the_first_ones_have_no_weight(isa: str, dtype: str, below: int) -> None:
    pool = Pool(build(isa), spec_of(dtype))
    one = add(pool, torch.where(POSITIONS < 64, 0, -below))
    one.q[:, :, 0] = 16  # all rows
    one.v[64:] = 1e20
    pool.step([(one, 500)])
    for _ in range(5):
        pool.step([(one, 1)])
    expected = reference_attention(one.q[:505], one.k[:505], one.v[:505], pool.layer)
    torch.testing.assert_close(one.output.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("above", [40, 59, 70])
def test_a_key_that_has_all_the_weight_gives_its_very_value(
    isa: str, kv_dtype: str, above: int
) -> None:
    spec = make_spec(num_heads=5, num_kv_heads=1, dtype="float32", kv_dtype=kv_dtype)
    pool = Pool(build(isa), spec)
    one = add(pool, torch.where(POSITIONS == 150, above, 0))
    one.q[:, :, 0] = 16  # all rows
    one.v = one.v.bfloat16().float()
    pool.step([(one, 500)])
    expected = one.v[150].expand(350, 5, -1)
    torch.testing.assert_close(one.output[150:], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["61 above", "rising by 70"])
def test_what_is_not_a_number_changes_no_bit_of_rows_that_do_not_see_it(
    isa: str, name: str, dtype: str
) -> None:
    backend = build(isa)
    outputs = []
    for is_spoilt in (False, True):
        pool = Pool(backend, spec_of(dtype))
        one, other = add(pool, LOGITS[name]), add(pool, LOGITS[name])
        if is_spoilt:
            one.k[205, 0, 3] = torch.nan
            one.q[130, 2, 3] = torch.nan
        for count in (300, 1, 1):
            pool.step([(one, count), (other, count)])
        outputs.append((one.output, other.output))
    (expected, expected_other), (spoilt, other_output) = outputs
    assert torch.equal(other_output, expected_other)
    is_nan = torch.zeros(302, 5, dtype=torch.bool)
    is_nan[205:], is_nan[130, 2] = True, True
    assert spoilt[is_nan].isnan().all()
    assert torch.equal(spoilt[~is_nan], expected[~is_nan])
