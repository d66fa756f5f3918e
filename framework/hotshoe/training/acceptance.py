"""How many drafts would be accepted: greedy decoding with a head, replayed over known answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hotshoe.training.batches import make_batch, plan_batches
from hotshoe.training.features import Example

Unroll = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a head achieves on greedy answers.

    Attributes:
        per_position: share of the rounds in which the draft at that position was accepted, if every
            token started a round.
        tokens_per_round: accepted drafts and the target's own token, per round of decoding.
        num_rounds: how many there were.
    """

    per_position: tuple[float, ...]
    tokens_per_round: float
    num_rounds: int

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.per_position)
        return f"{self.tokens_per_round:.3f} tokens per round, accepted per position {shares}"


@torch.no_grad()
def measure_acceptance(
    unroll: Unroll,
    head: Tensor,
    draft_vocab: Tensor,
    examples: Sequence[Example],
    *,
    num_steps: int,
    max_tokens: int,
) -> Acceptance:
    """Replay greedy answers.

    Args:
        unroll: the head's.
        head: ``[draft_vocab_size, H]``.
        draft_vocab: ``[draft_vocab_size]`` target ids.
        examples: with greedy answers; others are left out.
        num_steps: drafts per round.
        max_tokens: padded tokens of a batch.
    """
    greedy = sorted((one for one in examples if one.is_greedy), key=len)
    accepted = torch.zeros(num_steps)
    num_starts, num_rounds, num_tokens = 0, 0, 0
    for indices in plan_batches([len(one) for one in greedy], max_tokens):
        batch = make_batch([greedy[index] for index in indices], num_steps + 1)
        if not len(batch.rows[0]):
            continue
        wanted = batch.token_ids[batch.rows]
        hits = torch.zeros(num_steps, *batch.token_ids.shape, dtype=torch.bool)
        for step, output in enumerate(unroll(batch, num_steps)):
            guessed = draft_vocab[F.linear(output, head).argmax(-1)]
            hits[step][batch.rows] = guessed == wanted
        # run[b, p]: how many drafts are accepted of a round whose first draft is for position p
        chains = torch.stack(
            [F.pad(hits[step], (0, step))[:, step:] for step in range(num_steps)]
        ).cumprod(0)
        run = chains.sum(0)
        is_answer = torch.zeros_like(hits[0])
        is_answer[batch.rows] = True
        accepted += chains[:, is_answer].sum(-1)
        num_starts += int(is_answer.sum())
        for marks, runs in zip(is_answer.tolist(), run.tolist(), strict=True):
            rounds, tokens = _replay(marks, runs)
            num_rounds += rounds
            num_tokens += tokens
    return Acceptance(
        per_position=tuple((accepted / max(num_starts, 1)).tolist()),
        tokens_per_round=num_tokens / max(num_rounds, 1),
        num_rounds=num_rounds,
    )


def _replay(is_answer: Sequence[bool], run: Sequence[int]) -> tuple[int, int]:
    """Rounds and tokens of one conversation: a round accepts its run, then the target adds one."""
    position, rounds, tokens = 0, 0, 0
    while position < len(is_answer):
        if not is_answer[position]:
            position += 1
            continue
        advance = run[position] + 1
        gained = min(advance, _length_of_answer(is_answer, position))
        rounds += 1
        tokens += gained
        position += advance
    return rounds, tokens


def _length_of_answer(is_answer: Sequence[bool], position: int) -> int:
    end = position
    while end < len(is_answer) and is_answer[end]:
        end += 1
    return end - position
