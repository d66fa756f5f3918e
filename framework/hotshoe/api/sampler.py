"""Sampler contract: logits to candidates with probabilities. The core owns the randomness and
draws.

The token at a position is a function of (seed, choice index, position, target distribution): one
uniform per token, inverse CDF over candidates in canonical order, ascending token id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        token_ids: ``[R, C]`` int64, ascending among entries with a positive probability; None =
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
        devices: where the logits may be.
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
        ``inverse_cdf(self.candidates(inputs), uniforms)`` returns, up to rounding at the
        boundaries.

        Args:
            inputs: see ``SampleInput``.
            uniforms: ``[R]`` float64 in ``[0, 1)``.

        Returns:
            ``[R]`` int64 token ids.
        """
        return inverse_cdf(self.candidates(inputs), uniforms)

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
        token_ids = _argmax(logits)
        return token_ids, logits.gather(1, token_ids[:, None])[:, 0].float()


def inverse_cdf(candidates: Candidates, uniforms: Tensor) -> Tensor:
    """Pick, per row, the first candidate at which the cumulated probability exceeds ``uniform *
    total``.

    Args:
        candidates: ``[R, C]``.
        uniforms: ``[R]`` in ``[0, 1)``.

    Returns:
        ``[R]`` int64 token ids; a candidate with probability 0 is never returned.

    Raises:
        ShapeError: if the row counts differ.
    """
    probs = candidates.probs
    if probs.shape[0] != uniforms.shape[0]:
        raise ShapeError(f"{probs.shape[0]} rows of candidates but {uniforms.shape[0]} uniforms")
    index = _search(probs, uniforms)
    if candidates.token_ids is None:
        return index
    return candidates.token_ids.gather(1, index.unsqueeze(1)).squeeze(1)


def _search(probs: Tensor, uniforms: Tensor) -> Tensor:
    """``[R]`` index into C. Two levels, so that a wide row isn't cumulated as a whole; float64, so
    that it is exact enough.
    """
    import torch

    num_rows, width = probs.shape
    block = 256
    if width > 4 * block:
        padded = probs
        if width % block:
            padded = torch.nn.functional.pad(probs, (0, -width % block))
        padded = padded.view(num_rows, -1, block)
        # float32 within a block, float64 across: off by 1e-7, at a fifth of the time
        sums = padded.sum(-1).to(torch.float64)
        outer = sums.cumsum(-1)
        target = uniforms.to(torch.float64) * outer[:, -1]
        chosen = _first_above(outer, sums, target)
        before = (outer.gather(1, chosen[:, None]) - sums.gather(1, chosen[:, None])).squeeze(1)
        inner = padded.gather(1, chosen[:, None, None].expand(-1, 1, block)).squeeze(1)
        inner = inner.to(torch.float64)
        return chosen * block + _first_above(inner.cumsum(-1), inner, target - before)
    exact = probs.to(torch.float64)
    cumulated = exact.cumsum(-1)
    return _first_above(cumulated, exact, uniforms.to(torch.float64) * cumulated[:, -1])


def _first_above(cumulated: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    import torch

    index = torch.searchsorted(cumulated, target[:, None], right=True).squeeze(1)
    # rounding may carry the target past the end: then the last entry with any weight is meant
    positions = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, positions, -1).amax(-1)
    return torch.minimum(index, last)


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
