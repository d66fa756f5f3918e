"""Examples or windows of them, as padded batches in an order that a seed alone decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hotshoe.training.features import Example

_SORTED_TOGETHER = 32
"""Batches whose examples are sorted by length together: little padding, and still mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of an example that is trained on as if there were no more of it.

    Attributes:
        num_context: tokens at its begin that are not trained on.
    """

    example: Example
    start: int
    stop: int
    num_context: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self) -> Example:
        """The stretch, as views."""
        span = slice(self.start, self.stop)
        one = self.example
        return replace(
            one,
            token_ids=one.token_ids[span],
            is_answer=one.is_answer[span],
            features=one.features[span],
            states=one.states[span],
        )


def cut_windows(examples: Sequence[Example], size: int | None, *, num_context: int) -> list[Window]:
    """Cut examples so that neighbours, which are alike, come to be in different batches.

    Args:
        size: tokens to train on in each window; None = whole examples.
        num_context: tokens in front of them.
    """
    if size is None:
        return [Window(example=one, start=0, stop=len(one)) for one in examples]
    windows = []
    for one in examples:
        is_answer = one.is_answer.tolist()
        for first in range(num_context, len(one), size):
            if any(is_answer[first : first + size]):
                stop = min(first + size, len(one))
                windows.append(
                    Window(
                        example=one, start=first - num_context, stop=stop, num_context=num_context
                    )
                )
    return windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples of about the same length. B=num_examples T=max_len N=num_answer_tokens

    Attributes:
        token_ids: ``[B, T]`` int64.
        features: ``[B, T, L*H]``, outputs of the fused layers.
        states: ``[B, T, H]``, after the final norm.
        rows: ``[2, N]`` int64, example and position of the answer tokens that a head is to predict.
    """

    token_ids: Tensor
    features: Tensor
    states: Tensor
    rows: tuple[Tensor, Tensor]

    @property
    def targets(self) -> Tensor:
        """``[N, H]``: the states from which the target predicts the tokens at ``rows``."""
        example, position = self.rows
        return self.states[example, position - 1]


def make_batch(examples: Sequence[Example], first_position: int) -> Batch:
    """Pad examples to one length.

    Args:
        first_position: answer tokens before it are left out: a head needs so many before them.
    """
    is_answer = pad_sequence([one.is_answer for one in examples], batch_first=True)
    is_answer[:, :first_position] = False
    example, position = is_answer.nonzero(as_tuple=True)
    return Batch(
        token_ids=pad_sequence([one.token_ids for one in examples], batch_first=True),
        features=pad_sequence([one.features for one in examples], batch_first=True),
        states=pad_sequence([one.states for one in examples], batch_first=True),
        rows=(example, position),
    )


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut a sequence of examples into batches of at most ``max_tokens`` padded tokens each."""
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for index, length in enumerate(lengths):
        if batch and max(longest, length) * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch, longest = [], 0
        batch.append(index)
        longest = max(longest, length)
    return [*batches, batch] if batch else batches


def epoch_order(lengths: Sequence[int], max_tokens: int, *, seed: int) -> list[list[int]]:
    """The batches of one epoch, as indices of examples: shuffled, of similar lengths."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(sum(lengths) // max(len(lengths), 1), 1)
    together = _SORTED_TOGETHER * max(max_tokens // mean, 1)
    batches = []
    for start in range(0, len(order), together):
        chunk = sorted(order[start : start + together], key=lambda index: lengths[index])
        planned = plan_batches([lengths[index] for index in chunk], max_tokens)
        batches += [[chunk[position] for position in batch] for batch in planned]
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in shuffled]


def endless_order(lengths: Sequence[int], max_tokens: int, *, seed: int) -> Iterator[list[int]]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        yield from epoch_order(lengths, max_tokens, seed=seed * 1_000_003 + epoch)
        epoch += 1
