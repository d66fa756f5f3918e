"""Speculative-decoding contract: propose draft tokens; the core verifies them and keeps those that
the target would draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeInput:
    """All requests of the step that just ran, one entry each.

    Attributes:
        request_ids: stable identity, to key a drafter's own state on.
        token_ids: per request its committed tokens so far, prompt and output, as a read-only
            ``[num_tokens]`` int32 view that is valid during the call only.
        max_draft_tokens: per request, the most that can be used next: 0 while its prompt is
            still being computed, or near its length limit.
        num_accepted: per request, how many drafts of the last round were kept; ``num_drafted``
            is how many were verified.
        hidden_states: by layer as in ``Requirements.hidden_state_layers``, ``[num_tokens,
            hidden_size]`` over all tokens of the step, packed as ``query_start_loc`` (``[num_reqs +
            1]``) says.
    """

    request_ids: Sequence[str]
    token_ids: Sequence[np.ndarray]
    max_draft_tokens: Sequence[int]
    num_drafted: Sequence[int]
    num_accepted: Sequence[int]
    query_start_loc: Sequence[int]
    hidden_states: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """Drafts per request, in the order of the input; an empty list means to go without.

    Attributes:
        token_ids: chains of token ids, or the nodes of a tree in depth-first order.
        parents: per request, each node's parent index within its list, -1 for children of the
            last committed token; None = chains.
    """

    token_ids: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """Facts a proposer may be built on."""

    device: torch.device
    vocab_size: int
    max_model_len: int
    max_num_seqs: int


class Proposer(ABC):
    """Drafts tokens on the rank that samples. Built once per worker as ``factory(options,
    ProposerContext)``.
    """

    max_draft_tokens: int
    """The most drafts per request and step; the core reserves room for them."""

    @abstractmethod
    def propose(self, inputs: ProposeInput) -> DraftTokens:
        """Draft after a step. Called at every step, also when no request may use drafts, so that
        state has no holes.
        """

    def forget(self, request_ids: Sequence[str]) -> None:  # noqa: B027  # optional: most keep none
        """Drop state of requests that ended. Called only if
        ``Requirements.needs_finished_requests``.
        """
