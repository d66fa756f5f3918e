"""``ChainDrafter``: passes of a drafter's layers one behind another, each of which takes the token
that the one before drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hotshoe.api import DraftDraws, DraftForwards, DraftPass, DraftSpans, Kernels

Tensors = Sequence[Tensor]
"""What a pass takes besides tokens: ``[num_tokens, ...]`` each."""


class ChainLayers(Protocol):
    """The layers of a drafter."""

    def cache(self, entries: DraftPass, token_ids: Tensor, inputs: Tensors) -> Tensors:
        """Write what the layers keep for some tokens, and compute no more than that needs.

        Returns:
            Any tensor that was computed.
        """

    def begin(
        self, entries: DraftPass, token_ids: Tensor, last_rows: Tensor, inputs: Tensors
    ) -> tuple[Tensor, Tensors]:
        """As ``cache``, and go on with some rows: their logits, and what the next pass takes."""

    def go_on(self, entry: DraftPass, token_ids: Tensor, inputs: Tensors) -> tuple[Tensor, Tensors]:
        """A pass over one token per chain, which the pass before drafted."""


class ChainDrafter:
    """Drafts chains, in one recordable function where the most likely tokens are taken.

    Args:
        forwards: runs the functions.
        kernels: whose ops they are.
        layers: what a pass consists of.
    """

    def __init__(self, forwards: DraftForwards, kernels: Kernels, layers: ChainLayers) -> None:
        self._forwards = forwards
        self._kernels = kernels
        self._layers = layers
        self._target_ids: Tensor | None = None

    def use_vocabulary(self, target_ids: Tensor) -> None:
        """The target's id of each token of the draft vocabulary, ``[width]`` int64."""
        self._target_ids = target_ids.view(-1, 1)

    def cache(self, entries: DraftSpans, token_ids: Tensor, *inputs: Tensor) -> None:
        """Write entries, and draft nothing."""
        self._forwards.run(self._cache, [entries], token_ids, *inputs)

    def draft(
        self,
        entries: DraftSpans,
        chains: DraftSpans,
        num_drafts: int,
        draws: DraftDraws | None,
        *inputs: Tensor,
    ) -> list[list[int]]:
        """Write entries, and draft on.

        Args:
            entries: of all requests.
            chains: what the second pass is over, a token of each request that drafts.
            num_drafts: number of passes.
            draws: draws the drafts; None = they are the most likely tokens.
            inputs: as ``ChainLayers.begin`` takes them.

        Returns:
            Token ids of the target by pass and chain.
        """
        spans = [
            DraftSpans(
                requests=chains.requests,
                first_positions=[position + place for position in chains.first_positions],
                num_tokens=chains.num_tokens,
            )
            for place in range(num_drafts - 1)
        ]
        if draws is None:
            drafts = self._forwards.run(self._draft, [entries, *spans], *inputs)
            return [ids.tolist() for ids in drafts]
        run, requests = self._forwards.run, chains.requests
        logits, *state = run(self._begin, [entries], *inputs)
        ids = self._drawn(draws, logits, requests, 0)
        drawn = [ids.tolist()]
        for span in spans:
            logits, *state = run(self._go_on, [span], ids, *state)
            ids = self._drawn(draws, logits, requests, len(drawn))
            drawn.append(ids.tolist())
        return drawn

    def _drawn(
        self, draws: DraftDraws, logits: Tensor, requests: Sequence[int], num_before: int
    ) -> Tensor:
        token_ids = None if self._target_ids is None else self._target_ids.view(-1)
        return draws.draw(logits, requests, [num_before] * len(requests), token_ids)

    def _most_likely(self, logits: Tensor) -> Tensor:
        token_ids = self._kernels.argmax(logits)
        if self._target_ids is None:
            return token_ids
        return self._kernels.take_rows(self._target_ids, token_ids).view(-1)

    # -- what is recorded -------------------------------------------------------------------

    def _cache(
        self, passes: Sequence[DraftPass], token_ids: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(self._layers.cache(passes[0], token_ids, inputs))

    def _begin(
        self, passes: Sequence[DraftPass], token_ids: Tensor, last_rows: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        logits, state = self._layers.begin(passes[0], token_ids, last_rows, inputs)
        return logits, *state

    def _go_on(
        self, passes: Sequence[DraftPass], token_ids: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        logits, state = self._layers.go_on(passes[0], token_ids, inputs)
        return logits, *state

    def _draft(
        self, passes: Sequence[DraftPass], token_ids: Tensor, last_rows: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        logits, state = self._layers.begin(passes[0], token_ids, last_rows, inputs)
        drafts = [self._most_likely(logits)]
        for one in passes[1:]:
            logits, state = self._layers.go_on(one, drafts[-1], state)
            drafts.append(self._most_likely(logits))
        return tuple(drafts)
