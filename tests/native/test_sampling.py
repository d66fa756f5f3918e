"""The ops of ``sampling.cpp``: what they touch, on every instruction set of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe_native.isa import available
from hotshoe_native.library import load
from hotshoe_native.sampling import (
    mask_args,
    most_likely_args,
    sample_args,
    sample_scratch_bytes,
)

EVERY_ISA = pytest.mark.parametrize("isa", [isa.name for isa in available()])
EVERY_TYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
GUARD = 4096
PARAMETERS = [
    (0.0, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.0),
    (0.8, 7, 1.0, 0.0),
    (1.0, 2000, 0.9, 0.001),
    (1.0, 0, 0.999, 0.0),
    (5.0, 0, 0.5, 0.0),
    (0.5, 0, 1.0, 0.1),
]


def guarded(num_bytes: int) -> Tensor:
    """Bytes of a known value, with more of them behind the part that an op may write to."""
    return torch.full((num_bytes + GUARD,), 0xA5, dtype=torch.uint8)


def rows_of(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie apart, one for each of the parameters; rubbish lies between them."""
    numbers = torch.Generator().manual_seed(vocab_size)
    wide = torch.full((len(PARAMETERS), vocab_size + 5), torch.nan)
    wide[:, :vocab_size] = torch.randn(len(PARAMETERS), vocab_size, generator=numbers) * 3
    wide[::2, :vocab_size] = wide[::2, :vocab_size].round()
    return wide.to(dtype)[:, :vocab_size]


@EVERY_ISA
@EVERY_TYPE
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [1, 16, 17, 256, 5003])
def test_a_draw_writes_nothing_but_its_tokens_and_scratch(
    vocab_size: int, num_threads: int, dtype: torch.dtype, isa: str
) -> None:
    library = load(isa)
    logits = rows_of(vocab_size, dtype)
    before = logits.clone()
    num_bytes = num_threads * sample_scratch_bytes(library, vocab_size)
    scratch, token_ids = guarded(num_bytes), guarded(8 * len(logits))
    temperature, top_k, top_p, min_p = zip(*PARAMETERS, strict=True)
    columns = [torch.tensor(one, dtype=torch.float32) for one in (temperature, top_p, min_p)]
    ks = torch.tensor(top_k)
    uniforms = torch.from_numpy(np.random.default_rng(0).random(len(logits)))
    args = sample_args(
        logits,
        temperature=columns[0],
        top_k=ks,
        top_p=columns[1],
        min_p=columns[2],
        uniforms=uniforms,
        token_ids=token_ids,
        scratch=scratch,
    )

    library.op("sample")(args, num_threads)

    drawn = token_ids[: 8 * len(logits)].view(torch.int64)
    assert ((drawn >= 0) & (drawn < vocab_size)).all()
    assert (token_ids[8 * len(logits) :] == 0xA5).all()
    assert (scratch[num_bytes:] == 0xA5).all()
    assert torch.equal(logits, before)


@EVERY_ISA
@EVERY_TYPE
@pytest.mark.parametrize("vocab_size", [1, 17, 5003])
def test_what_lies_between_rows_is_never_the_most_likely(
    vocab_size: int, dtype: torch.dtype, isa: str
) -> None:
    logits = rows_of(vocab_size, dtype)
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    values = torch.empty(len(logits))
    load(isa).op("most_likely")(most_likely_args(logits, token_ids, values), 2)
    assert token_ids.tolist() == logits.float().numpy().argmax(-1).tolist()
    assert torch.equal(values, logits.float().amax(-1))


@EVERY_ISA
@EVERY_TYPE
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 5003])
def test_a_mask_writes_nothing_but_its_rows(vocab_size: int, dtype: torch.dtype, isa: str) -> None:
    wide = torch.zeros(3, vocab_size + 40, dtype=dtype)
    bitmask = torch.zeros(3, -(-vocab_size // 32), dtype=torch.int32)
    bitmask[1] = -1
    load(isa).op("mask")(mask_args(wide[:, :vocab_size], bitmask), 2)
    assert (wide[::2, :vocab_size] == -torch.inf).all()
    assert not wide[1].any()
    assert not wide[:, vocab_size:].any()


@EVERY_ISA
def test_a_row_is_drawn_once_when_there_are_more_threads_than_rows(isa: str) -> None:
    library, vocab_size, num_threads = load(isa), 300, 2
    logits = rows_of(vocab_size, torch.float32)[:1]
    one, none, k = torch.ones(1), torch.zeros(1), torch.ones(1, dtype=torch.int64)
    uniforms, token_ids = torch.full((1,), 0.9, dtype=torch.float64), torch.full((1,), -1)
    scratch = guarded(num_threads * sample_scratch_bytes(library, vocab_size))
    args = sample_args(
        logits,
        temperature=one,
        top_k=k,
        top_p=one,
        min_p=none,
        uniforms=uniforms,
        token_ids=token_ids,
        scratch=scratch,
    )
    library.op("sample")(args, num_threads)
    assert token_ids.tolist() == [int(logits[0].argmax())]
