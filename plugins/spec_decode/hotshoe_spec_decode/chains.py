"""``ChainDrafter``: passes of a drafter's layers one behind another, each of which takes the token
that the one before drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hotshoe.api import (
    DraftDraws,
    DraftForwards,
    DraftPass,
    DraftSpans,
    DraftTokens,
    Kernels,
    ProposeInput,
)

Tensors = Sequence[Tensor]
"""What a pass takes besides tokens: ``[num_tokens, ...]`` each."""


@dataclass(slots=True)
class Run:
    """What a pass computes of one request.

    Attributes:
        request: index in the step.
        first: position of the first token.
        end: position after the last one, where drafting goes on.
        num_drafts: most that are to be drafted behind it.
        num_spare: tokens behind the end that are computed all the same, for nothing: what they
            write is overwritten before anything attends to it.
    """

    request: int
    first: int
    end: int
    num_drafts: int
    num_spare: int = field(default=0, kw_only=True)


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
        """As ``cache``, and go on with some rows: their logits, and what the next pass takes. If
        ``entries.step`` wants any rows, it's these.
        """

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

    def propose(
        self, inputs: ProposeInput, runs: Sequence[Run], token_ids: Tensor, *features: Tensor
    ) -> DraftTokens:
        """Write what runs compute, and draft behind those that are to have drafts.

        Args:
            runs: one for each request that has something to write or to draft.
            token_ids: that the layers take, of all runs; any for those that are spare.
            features: as ``ChainLayers.cache`` takes them, of all runs.
        """
        drafts: list[list[int]] = [[] for _ in inputs.request_ids]
        if not runs:
            return DraftTokens(token_ids=drafts)
        counts = [run.end - run.first + run.num_spare for run in runs]
        # the rows that go on aren't the last ones where a run has spare tokens
        is_ragged = any(run.num_spare and run.num_drafts for run in runs)
        entries = DraftSpans(
            requests=[run.request for run in runs],
            first_positions=[run.first for run in runs],
            num_tokens=counts,
            num_wanted=None if is_ragged else [min(run.num_drafts, 1) for run in runs],
        )
        drafting = [index for index, run in enumerate(runs) if run.num_drafts]
        if not drafting:
            self.cache(entries, token_ids, *features)
            return DraftTokens(token_ids=drafts)
        chains = DraftSpans(
            requests=[runs[index].request for index in drafting],
            first_positions=[runs[index].end for index in drafting],
            num_tokens=[1] * len(drafting),
        )
        ends = list(accumulate(counts))
        last_rows = torch.tensor([ends[index] - 1 - runs[index].num_spare for index in drafting])
        depth = max(run.num_drafts for run in runs)
        drawn = self.draft(entries, chains, depth, inputs.draws, token_ids, last_rows, *features)
        for column, index in enumerate(drafting):
            run = runs[index]
            drafts[run.request] = [ids[column] for ids in drawn[: run.num_drafts]]
        return DraftTokens(token_ids=drafts)

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
        # copies, as layers add to what they are given, and a recorded pass returns what is its own
        copies = [self._kernels.concat([one]) for one in inputs]
        logits, state = self._layers.go_on(passes[0], token_ids, copies)
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


def num_drafts_of(
    inputs: ProposeInput, request: int, *, max_draft_tokens: int, max_model_len: int
) -> int:
    """Drafts of a request. Near the model's limit it has no slots for a whole chain."""
    if len(inputs.token_ids[request]) + max_draft_tokens > max_model_len:
        return 0
    return min(inputs.max_draft_tokens[request], max_draft_tokens)
