"""``MedusaProposer``: one pass over the last hidden state of each request drafts a chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotshoe.api import (
    ConfigError,
    DraftDraws,
    DraftFunction,
    DraftPass,
    DraftTokens,
    ProposeInput,
    Proposer,
    ProposerContext,
    Requirements,
)
from hotshoe_spec_decode.medusa import MedusaOptions
from hotshoe_spec_decode.medusa.heads import MedusaConfig, MedusaHeads


class MedusaProposer(Proposer):
    """Head j drafts the token j + 2 positions behind the last one that the target computed: the one
    right behind it has been sampled. Keeps no state.
    """

    def __init__(self, options: MedusaOptions, context: ProposerContext) -> None:
        target = context.require_target()
        self._path = options.model
        self._forwards = target.forwards
        with target.open_checkpoint(options.model) as checkpoint:
            config = MedusaConfig.read(checkpoint)
            layers = target.make_layers(checkpoint.format)
        self.max_draft_tokens = options.num_draft_tokens or config.num_heads
        if self.max_draft_tokens > config.num_heads:
            raise ConfigError(
                f"spec_decode.options.num_draft_tokens is {options.num_draft_tokens} but "
                f"{options.model!r} has {config.num_heads} heads; lower it, or leave it out"
            )
        self._heads = MedusaHeads(
            config, target, layers, num_heads=self.max_draft_tokens, device=context.device
        )
        self.requirements = Requirements(hidden_state_layers=(-1,), needs_every_step=False)
        counts = range(1, self.max_draft_tokens + 1)
        self._most_likely = [_most_likely(self._heads, count) for count in counts]
        self._logits = [_logits(self._heads, count) for count in counts]

    def load_weights(self) -> None:
        self._heads.load(self._path)

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        drafts: list[list[int]] = [[] for _ in inputs.request_ids]
        drafting = [index for index, allowed in enumerate(inputs.max_draft_tokens) if allowed > 0]
        if drafting:
            last_rows = [
                inputs.query_start_loc[index + 1]
                - 1
                - (inputs.num_drafted[index] - inputs.num_accepted[index])
                for index in drafting
            ]
            states = inputs.hidden_states[-1]
            hidden = states.index_select(0, torch.tensor(last_rows, device=states.device))
            depth = min(max(inputs.max_draft_tokens), self.max_draft_tokens)
            chains = self._chains(hidden, drafting, depth, inputs.draws).tolist()
            for index, chain in zip(drafting, chains, strict=True):
                drafts[index] = chain[: inputs.max_draft_tokens[index]]
        return DraftTokens(token_ids=drafts)

    def _chains(
        self, hidden: Tensor, requests: list[int], num_drafts: int, draws: DraftDraws | None
    ) -> Tensor:
        """Token ids of the target, ``[num_requests, num_drafts]``."""
        if draws is None:
            (ids,) = self._forwards.run(self._most_likely[num_drafts - 1], (), hidden)
            return ids.view(len(requests), -1)
        token_ids = self._heads.token_ids
        logits = self._forwards.run(self._logits[num_drafts - 1], (), hidden)
        if len(logits) == 1:
            rows = [request for request in requests for _ in range(num_drafts)]
            places = list(range(num_drafts)) * len(requests)
            return draws.draw(logits[0], rows, places, token_ids).view(-1, num_drafts)
        columns = [
            draws.draw(one, requests, [place] * len(requests), token_ids)
            for place, one in enumerate(logits)
        ]
        return torch.stack(columns, 1)


def _most_likely(heads: MedusaHeads, num_heads: int) -> DraftFunction:
    def run(passes: Sequence[DraftPass], hidden: Tensor) -> tuple[Tensor, ...]:
        return (heads.most_likely(hidden, num_heads),)

    return run


def _logits(heads: MedusaHeads, num_heads: int) -> DraftFunction:
    def run(passes: Sequence[DraftPass], hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(heads.logits(hidden, num_heads))

    return run
