"""Verification of drafts: a draft is kept iff the target draws that very token."""

from __future__ import annotations

from collections.abc import Sequence

from hotshoe.errors import ShapeError


def verify(
    draft_token_ids: Sequence[Sequence[int]], drawn_token_ids: Sequence[int]
) -> list[list[int]]:
    """Keep each draft while it equals the token that the target draws at its position.

    The output follows the target distribution exactly, and a seed means the same tokens with drafts
    on or off. For deterministic drafts the acceptance rate is that of rejection sampling (Leviathan
    et al. 2022, arXiv:2211.17192).

    Args:
        draft_token_ids: request i has ``k_i`` drafted ids.
        drawn_token_ids: ``[sum(k_i + 1)]``, the token that the target draws after the committed
            tokens of request i, then after each of its drafts.

    Returns:
        Per request, 1 to ``k_i + 1`` token ids: the accepted prefix plus one correction or bonus
        token.

    Raises:
        ShapeError: if the number of drawn tokens differs from ``sum(k_i + 1)``.
    """
    num_positions = len(draft_token_ids) + sum(map(len, draft_token_ids))
    if num_positions != len(drawn_token_ids):
        raise ShapeError(
            f"{len(drawn_token_ids)} drawn tokens for {num_positions} positions; "
            "each request needs one more than it has drafts"
        )
    if num_positions == len(draft_token_ids):
        return [[token_id] for token_id in drawn_token_ids]
    verified = []
    start = 0
    for drafts in draft_token_ids:
        drawn = drawn_token_ids[start : start + len(drafts) + 1]
        verified.append(list(drawn[: _num_accepted(drafts, drawn) + 1]))
        start += len(drafts) + 1
    return verified


def _num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    for position, draft in enumerate(drafts):
        if draft != drawn[position]:
            return position
    return len(drafts)
