"""Sampler contract: logits to candidates with probabilities. The core owns the randomness and
draws.

The token at a position is a function of (seed, choice index, position, target distribution): one
uniform per token is the key of a noise that each candidate has its own share of (``gumbel_max``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hotshoe.errors import ShapeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# R=number of sampled positions in a step, V=vocab_size, C=candidates per row


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInput:
    """The positions of one step that need a token, one row each; with drafts a request has several
    rows.

    Attributes:
        logits: ``[R, V]`` float32, or another type of ``SamplerCapabilities.logits_dtypes`` that
            the model gave them; penalties, biases and masks are already applied. May be
            overwritten. A masked token is ``-inf``; at least one token per row is finite.
        temperature: ``[R]`` float32; 0 = greedy: the core takes the most likely token whatever the
            sampler says of such a row, and doesn't ask if there are no others.
        top_k: ``[R]`` int64; 0 = all.
        top_p: ``[R]`` float32 in ``(0, 1]``.
        min_p: ``[R]`` float32 in ``[0, 1]``.
        is_all_greedy: whether every temperature is 0.
        is_any_filtered: whether any non-greedy row sets top_k, top_p or min_p.
        extra_args: ``SamplingParams.extra_args`` per row.
    """

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_all_greedy: bool
    is_any_filtered: bool
    extra_args: Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The target distribution of each row, restricted to the tokens that can be drawn.

    Attributes:
        probs: ``[R, C]`` float32, not negative, rows sum to 1 up to rounding; 0 pads shorter rows.
        token_ids: ``[R, C]`` int64, distinct among entries with a positive probability; None =
            the whole vocabulary, C = V.
    """

    probs: Tensor
    token_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerContext:
    """Facts a sampler may be built on."""

    device: torch.device
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCapabilities:
    """What a sampler can do, as data.

    Attributes:
        devices: where the logits may be. On ``cuda`` nothing may wait for the GPU, as to read a
            number or to index with a mask does: the next step is prepared meanwhile.
        logits_dtypes: types in which it takes a model's logits; others are converted to float32.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    logits_dtypes: tuple[str, ...] = ("float32",)


class Sampler(ABC):
    """Turns logits into candidates. Built per worker as ``factory(options, SamplerContext)``."""

    capabilities = SamplerCapabilities()

    @abstractmethod
    def candidates(self, inputs: SampleInput) -> Candidates:
        """The distribution that each row's token is to be drawn from. Must not use randomness of
        its own.
        """

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        """Draw one token per row.

        Overriding this with something faster is allowed if it returns what
        ``gumbel_max(self.candidates(inputs), uniforms)`` returns, up to rounding.

        Args:
            inputs: see ``SampleInput``.
            uniforms: ``[R]`` float64 in ``[0, 1)``.

        Returns:
            ``[R]`` int64 token ids.
        """
        return gumbel_max(self.candidates(inputs), uniforms)

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely token of each row and its logit: what greedy rows get, and how the core
        sees whether a row can be sampled from at all.

        Overriding this with something faster is allowed if it returns the same.

        Args:
            logits: ``[R, V]``, of a type in ``SamplerCapabilities.logits_dtypes``; not modified.

        Returns:
            ``[R]`` int64 token ids, of equal logits the lowest, and ``[R]`` float32. A row that
            holds NaN has NaN and the place of one.
        """
        if logits.device.type != "cpu":
            best, token_ids = logits.max(-1)
            return token_ids, best.float()
        token_ids = _argmax(logits)
        return token_ids, logits.gather(1, token_ids[:, None])[:, 0].float()

    def mask(self, logits: Tensor, bitmask: Tensor) -> None:
        """Forbid tokens: their logits become ``-inf``, in place. How the core applies the masks of
        guided decoding.

        Overriding this with something faster is allowed if it does the same.

        Args:
            logits: ``[R, V]``, of a type in ``SamplerCapabilities.logits_dtypes``.
            bitmask: ``[R, ceil(V / 32)]`` int32 on the same device; bit ``i`` of a row is 0 where
                token i is forbidden.
        """
        import torch

        table = _ceilings(logits.dtype, logits.device)
        # on a CPU few, which stay in its cache
        size = 16 if logits.device.type == "cpu" else 128
        for start in range(0, len(logits), size):
            part = logits[start : start + size]
            octets = bitmask[start : start + size].view(torch.uint8)
            ceilings = torch.nn.functional.embedding(octets.int(), table).flatten(1)
            torch.minimum(part, ceilings[:, : logits.shape[1]], out=part)


def gumbel_max(candidates: Candidates, uniforms: Tensor) -> Tensor:
    """Draw one candidate per row: the one with the largest logarithm of its probability plus Gumbel
    noise, which is a function of the row's uniform and the token id alone.

    So two distributions that are close mostly draw the same token from the same uniform, which
    drafts make use of (Daliri et al. 2024, arXiv:2408.07978). It is done in two levels, so that
    noise is needed for few tokens: first among blocks of ``DRAW_BLOCK`` consecutive token ids, by
    what each block has in sum, then among the tokens of the one that was drawn. Put in another way,
    it is a race: what has weight w arrives after a time that is exponential with rate w.

    Args:
        candidates: ``[R, C]``.
        uniforms: ``[R]`` float64 in ``[0, 1)``, multiples of ``2**-53``.

    Returns:
        ``[R]`` int64 token ids; a candidate with probability 0 is never returned.

    Raises:
        ShapeError: if the row counts differ.
    """
    import torch

    probs, token_ids = candidates.probs, candidates.token_ids
    if probs.shape[0] != uniforms.shape[0]:
        raise ShapeError(f"{probs.shape[0]} rows of candidates but {uniforms.shape[0]} uniforms")
    keys = _mixed((uniforms.to(torch.float64) * _2_TO_53).to(torch.int64) + _GOLDEN)[:, None]
    if token_ids is None:
        probs, token_ids = _drawn_block(probs, keys)
    else:
        block_ids = token_ids // DRAW_BLOCK
        if probs.device.type == "cpu":
            sums = probs.new_zeros((len(probs), int(block_ids.max()) + 1))
            chosen = _first(sums.scatter_add_(1, block_ids, probs), keys, _block_numbers(sums))
        else:
            # how many blocks there are isn't known without waiting, so each candidate has its own
            place = _first(_sums_of_blocks(probs, block_ids), keys, _FIRST_BLOCK + block_ids)
            chosen = block_ids.gather(1, place)
        probs = probs * (block_ids == chosen)
    return token_ids.gather(1, _first(probs, keys, token_ids))[:, 0]


@cache
def _ceilings(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[256, 8]``: what a byte of a bitmask makes of its eight logits at most. To look that up is
    much faster on a CPU than to unpack bits and fill.
    """
    import torch

    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits == 1, torch.inf, -torch.inf).to(dtype)


DRAW_BLOCK = 256
"""Token ids that ``gumbel_max`` draws among at once."""

_FIRST_BLOCK = 2**32  # numbers of blocks, as far as noise is concerned; those below are token ids
_2_TO_53 = float(2**53)
# SplitMix64 (Steele et al. 2014): steps, shifts and factors, as signed numbers
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_SHIFTS_AND_FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def _drawn_block(probs: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, DRAW_BLOCK]`` probabilities and token ids of the block that each row draws."""
    import torch

    num_rows, width = probs.shape
    if width <= DRAW_BLOCK:
        return probs, torch.arange(width, device=probs.device).expand(num_rows, -1)
    if width % DRAW_BLOCK:
        probs = torch.nn.functional.pad(probs, (0, -width % DRAW_BLOCK))
    blocks = probs.view(num_rows, -1, DRAW_BLOCK)
    sums = blocks.sum(-1)
    chosen = _first(sums, keys, _block_numbers(sums))
    inner = blocks.gather(1, chosen[:, :, None].expand(-1, 1, DRAW_BLOCK))[:, 0]
    return inner, chosen * DRAW_BLOCK + torch.arange(DRAW_BLOCK, device=probs.device)


def _sums_of_blocks(probs: Tensor, block_ids: Tensor) -> Tensor:
    """``[R, C]`` float64: for each candidate what all of its block have in sum."""
    import torch

    ordered_ids, order = block_ids.sort(-1)
    ends = probs.gather(1, order).double().cumsum(-1)
    last = torch.searchsorted(ordered_ids, block_ids, right=True) - 1
    first = torch.searchsorted(ordered_ids, block_ids)
    before = ends.gather(1, (first - 1).clamp_(min=0)).where(first > 0, 0.0)
    return ends.gather(1, last) - before


def _block_numbers(sums: Tensor) -> Tensor:
    import torch

    return torch.arange(_FIRST_BLOCK, _FIRST_BLOCK + sums.shape[1], device=sums.device)


def _first(weights: Tensor, keys: Tensor, numbers: Tensor) -> Tensor:
    """``[R, 1]`` index of the first to arrive: the largest of weight over exponential noise.

    Args:
        weights: ``[R, N]``, not negative.
        keys: ``[R, 1]`` int64.
        numbers: ``[N]`` or ``[R, N]`` int64, what the noise of each is a function of.
    """
    import torch

    bits = (_mixed(keys + numbers * _GOLDEN) >> 12) & (2**52 - 1)
    times = bits.to(torch.float64).add_(0.5).mul_(2.0**-52).log_()  # below 0
    return (weights / times).argmin(-1, keepdim=True)


def _mixed(values: Tensor) -> Tensor:
    for shift, factor in _SHIFTS_AND_FACTORS:
        values = (values ^ ((values >> shift) & (2 ** (64 - shift) - 1))) * factor
    return values


def _argmax(logits: Tensor) -> Tensor:
    """In two levels, which is several times as fast on a CPU as ``Tensor.argmax``."""
    import torch

    block = 256
    vocab_size = logits.shape[1]
    num_blocks, num_left = divmod(vocab_size, block)
    if num_blocks < 4:
        return logits.argmax(-1)
    # the largest of each block is a plain reduction, which vectorises; finding its place doesn't
    head = logits[:, : num_blocks * block]
    best = head.view(-1, num_blocks, block).amax(-1)
    if num_left:
        tail = logits[:, num_blocks * block :].amax(-1, keepdim=True)
        best = torch.cat((best, tail), dim=1)
    starts = best.argmax(-1, keepdim=True) * block
    places = (starts + torch.arange(block, device=logits.device)).clamp_(max=vocab_size - 1)
    within = logits.gather(1, places).argmax(-1, keepdim=True)
    return places.gather(1, within)[:, 0]
