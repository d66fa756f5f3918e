"""Guided decoding inside a step: mask each position, walk the drafts, keep what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hotshoe.api.guided_decoding import Grammar

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout


def constrained_requests(step: SamplingStep) -> list[int]:
    """Indices of the requests that have a grammar."""
    if not step.grammars:
        return []
    return [index for index, row in enumerate(step.rows) if row in step.grammars]


def mask_logits(logits: Tensor, layout: Layout, step: SamplingStep) -> None:
    """Set every token that a grammar forbids to ``-inf``, in place.

    A position behind a draft that the grammar refuses can't be reached; it stays as it is.

    Args:
        logits: ``[R, V]`` float32.
        layout: of the step.
        step: its grammars are as before when this returns.
    """
    indices = constrained_requests(step)
    if not indices:
        return
    num_positions = sum(len(layout.positions(index)) for index in indices)
    bitmask = torch.full((num_positions, -(-logits.shape[1] // 32)), -1, dtype=torch.int32)
    rows: list[int] = []
    for index in indices:
        grammar = step.grammars[layout.rows[index]]
        num_filled = _fill(grammar, step.draft_token_ids[index], bitmask, len(rows))
        rows.extend(layout.positions(index)[:num_filled])
    apply_bitmask(logits, bitmask[: len(rows)], rows)


def _fill(grammar: Grammar, drafts: Sequence[int], bitmask: Tensor, first: int) -> int:
    """Fill one mask per reachable position; returns how many there are."""
    num_accepted = 0
    grammar.fill_bitmask(bitmask, first)
    for draft in drafts:
        if grammar.is_terminated or not grammar.accept([draft]):
            break
        num_accepted += 1
        grammar.fill_bitmask(bitmask, first + num_accepted)
    if num_accepted:
        grammar.rollback(num_accepted)
    return num_accepted + 1


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Sequence[int]) -> None:
    """Mask the tokens whose bit is 0, in place.

    Args:
        logits: ``[R, V]`` float32.
        bitmask: ``[len(rows), ceil(V / 32)]`` int32 in main memory, 32 tokens a word, the lowest
            bit first.
        rows: the logits rows that the masks are for.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    words = bitmask.to(logits.device)
    is_forbidden = ((words.unsqueeze(-1) >> shifts) & 1).eq(0).flatten(1)[:, : logits.shape[1]]
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(is_forbidden, -torch.inf)
        return
    where = torch.tensor(rows, device=logits.device)
    logits[where] = logits[where].masked_fill_(is_forbidden, -torch.inf)


def advance(grammar: Grammar, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> bool:
    """Move a grammar over the tokens that were accepted.

    Args:
        grammar: of one request, as before the step.
        token_ids: its new tokens.
        stop_token_ids: tokens that end the output; nothing behind one matters.

    Returns:
        False if the grammar refuses a token that its own mask allowed.
    """
    for token_id in token_ids:
        if grammar.is_terminated:
            return True
        if not grammar.accept([token_id]):
            return token_id in stop_token_ids
    return True
