"""Rules for which drafts are kept, other than that a draft is the token that is drawn anyway.

A rule names the token at positions that have a draft: that draft, or what takes its place. So
``verify`` is the same for all of them. Greedy requests are beyond rules: they get the most likely
token, whatever was drafted.
"""

# D=positions that a rule is asked about, V=vocab_size

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hotshoe.api.sampler import Candidates, gumbel_max

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How drafts were drawn, and numbers to decide with, each independent of all others.

    Attributes:
        drafter: ``[D, V]`` float32, the distribution that each draft was drawn from.
        coins: ``[D]`` float64 in ``[0, 1)``, to keep a draft or not.
        keys: ``[D]`` float64 in ``[0, 1)``, to draw a replacement.
    """

    drafter: Tensor
    coins: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedPositions:
    """Positions with drafts, of requests whose tokens are drawn.

    Attributes:
        token_ids: ``[D]`` int64, the drafts.
        target: ``[D, V]`` float32, the distribution that the token is to come from.
        chances: None for a rule that reads no drafter.
    """

    token_ids: Tensor
    target: Tensor
    chances: Chances | None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a rule says.

    Attributes:
        token_ids: ``[D]`` int64, the token at each position: the draft if it is kept.
        are_given: ``[D]`` bool; where False, the token is what is drawn without drafts.
    """

    token_ids: Tensor
    are_given: Tensor


class AcceptanceRule(ABC):
    """Decides about drafts by the distributions of the target and of the drafter.

    Attributes:
        reads_drafter: whether it is asked about drafts that were drawn from a distribution, and
            needs to know it, and not about others. Such a rule has to see every draft: to leave out
            those that the target refuses for sure would change how tokens are distributed. If
            False, drafters name the most likely tokens.
    """

    reads_drafter: bool

    @abstractmethod
    def judge(self, drafted: DraftedPositions) -> Verdicts:
        """The token at each position."""


class Leviathan(AcceptanceRule):
    """Rejection sampling (Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023,
    arXiv:2302.01318): keep a draft x with probability ``min(1, p(x) / q(x))``, else draw from what
    ``max(p - q, 0)`` leaves. Tokens are distributed as p.

    It isn't asked about drafts that were found without chance, for which ``q(x)`` is 1: to keep one
    with probability ``p(x)``, and else to draw from p without it, is what happens without a rule.
    """

    reads_drafter = True

    def judge(self, drafted: DraftedPositions) -> Verdicts:
        target, drafts, chances = drafted.target, drafted.token_ids, drafted.chances
        assert chances is not None
        drafter = chances.drafter
        p, q = (probs.gather(1, drafts[:, None])[:, 0].double() for probs in (target, drafter))
        rest = (target - drafter).clamp_(min=0)
        # if it is nothing, only rounding tells p from q
        rest = torch.where(rest.amax(-1, keepdim=True) > 0, rest, target)
        replacements = gumbel_max(Candidates(rest), chances.keys)
        is_kept = chances.coins * q < p
        return Verdicts(torch.where(is_kept, drafts, replacements), torch.ones_like(is_kept))


class Typical(AcceptanceRule):
    """Typical acceptance (Cai et al. 2024, arXiv:2401.10774): keep a draft x with
    ``p(x) > min(epsilon, delta * exp(-H(p)))``, where H is the entropy, and any other if it is
    what is drawn anyway. Tokens are NOT distributed as p.

    Args:
        epsilon: a probability that is always enough.
        delta: of ``exp(-H(p))``, which is the probability of each token if p is spread evenly over
            as many as it has in effect: the share that is enough.
    """

    reads_drafter = False

    def __init__(self, *, epsilon: float, delta: float) -> None:
        self._epsilon = epsilon
        self._delta = delta

    def judge(self, drafted: DraftedPositions) -> Verdicts:
        p = drafted.target.gather(1, drafted.token_ids[:, None])[:, 0]
        entropy = torch.special.entr(drafted.target).sum(-1)
        threshold = (self._delta * entropy.neg_().exp_()).clamp_(max=self._epsilon)
        return Verdicts(drafted.token_ids, p > threshold)
