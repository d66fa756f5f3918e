"""Runs a drafter beside its target step by step without a scheduler: which tokens are kept, and
which drafts are refused, is up to the test.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    DraftDraws,
    DraftTokens,
    LayerCache,
    ProposeInput,
    Proposer,
    ProposerContext,
    Requirements,
)
from hotshoe.api.layers import Attention, ForwardStep
from hotshoe.config import load_config
from hotshoe.engine.drafting import Drafter, DrafterBuilder
from hotshoe.engine.resolution import Resolver
from hotshoe.engine.skeleton import build_skeleton, facts_of
from hotshoe.plugins import PluginRegistry
from hotshoe.testing.forward import allocate_cache
from hotshoe.weights.checkpoint import open_checkpoint
from hotshoe.weights.loader import load_weights
from hotshoe.worker.batch import InputBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRequest:
    """One request's part of a step.

    Attributes:
        token_ids: its committed tokens after the step, prompt and output.
        num_kept: of them, how many the target computes in this step.
        refused: drafts that it computes behind those, and that aren't kept.
        max_draft_tokens: that may be drafted now.
        is_verified: whether those kept are accepted drafts, but for the first.
        is_dormant: as ``ProposeInput.is_dormant``.
    """

    token_ids: Sequence[int]
    num_kept: int
    refused: Sequence[int] = ()
    max_draft_tokens: int = 0
    is_verified: bool = False
    is_dormant: bool = False

    @property
    def num_drafted(self) -> int:
        """Drafts that the step verifies."""
        return self.num_accepted + len(self.refused)

    @property
    def num_accepted(self) -> int:
        """Drafts among the tokens that are kept."""
        return self.num_kept - 1 if self.is_verified else 0


class DraftingRig:
    """A target with its KV cache, and a drafter on the same blocks, both built as an engine does.

    Every request has blocks for the longest sequence from the start, in shuffled order.

    Attributes:
        hidden_states: of the last step, those that the drafter asked for.

    Args:
        model: checkpoint of the target.
        settings: as ``LLM`` takes them.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        config = load_config(overrides={"model": model} | settings, env={}).config
        resolver = Resolver(config, PluginRegistry(), {})
        with open_checkpoint(model) as checkpoint:
            facts = facts_of(config, checkpoint)
            self._skeleton = build_skeleton(resolver, checkpoint, facts)
            self._builder = DrafterBuilder(resolver, checkpoint.config, self._skeleton, facts)
            load_weights(self._skeleton.model, self._skeleton.layers, checkpoint)
        self._device = facts.device
        self._blocks_per_row = -(-facts.max_model_len // config.cache.block_size)
        self._num_blocks = config.scheduler.max_num_seqs * self._blocks_per_row
        self._free = list(range(self._num_blocks))
        random.Random(0).shuffle(self._free)
        self._caches = self._allocate(self._skeleton.attention_layers)
        self._batch = InputBatch(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=config.cache.block_size,
            num_groups=1,
            max_draft_tokens=64,
        )
        self._rows: dict[str, int] = {}
        self._drafter: Drafter | None = None
        self.hidden_states: dict[int, Tensor] = {}

    def context(self) -> ProposerContext:
        """What the drafter is to be built on."""
        return self._builder.context()

    def use(self, proposer: Proposer) -> None:
        """Load a drafter that was built on ``context``, and draft with it."""
        drafter = self._drafter = self._builder.finish(proposer)
        drafter.load_weights()
        caches = self._allocate(drafter.attention_layers)
        drafter.forwards.bind(drafter.parts, caches, self._batch)

    def restart(self, request_id: str, num_computed_tokens: int = 0) -> None:
        """Take a request back to so many tokens, as if it were preempted and found those cached."""
        self._batch.num_computed_tokens[self._row(request_id)] = num_computed_tokens

    def share(self, request_id: str, other: str, num_tokens: int) -> None:
        """Begin a request behind the first tokens of another one, as if it found them cached.

        Args:
            request_id: a new one.
            other: whose blocks it uses.
            num_tokens: a multiple of the block size.
        """
        row, tables = self._row(request_id), self._batch.block_tables[0]
        num_blocks = num_tokens // self._batch.block_size
        tables[row, :num_blocks] = tables[self._row(other), :num_blocks]
        self.restart(request_id, num_tokens)

    @torch.inference_mode()
    def step(
        self, requests: Mapping[str, DraftedRequest], *, draws: DraftDraws | None = None
    ) -> DraftTokens:
        """Run a step of the target and have the drafter draft.

        Args:
            requests: by id, in the order of the batch; those that are new begin here.
            draws: handed to the drafter.
        """
        assert self._drafter is not None, "no drafter is in use"
        batch, wanted = self._batch, list(requests.values())
        rows = [self._row(request_id) for request_id in requests]
        computed = batch.num_computed_tokens[rows]
        token_ids: list[int] = []
        for row, first, one in zip(rows, computed.tolist(), wanted, strict=True):
            batch.token_ids[row, : len(one.token_ids)] = one.token_ids
            batch.num_tokens[row] = len(one.token_ids)
            token_ids += [*one.token_ids[first : first + one.num_kept], *one.refused]
        counts = np.array([one.num_kept + len(one.refused) for one in wanted], np.int64)
        requirements = self._drafter.requirements
        step = self._forward(rows, computed, counts, token_ids, requirements)
        self.hidden_states = step.hidden_states
        batch.num_computed_tokens[rows] += [one.num_kept for one in wanted]
        self._drafter.forwards.begin(rows)
        return self._drafter.proposer.propose(
            ProposeInput(
                request_ids=list(requests),
                token_ids=[batch.history(row) for row in rows],
                num_computed_tokens=batch.num_computed_tokens[rows].tolist(),
                max_draft_tokens=[one.max_draft_tokens for one in wanted],
                is_dormant=[one.is_dormant for one in wanted],
                num_drafted=[one.num_drafted for one in wanted],
                num_accepted=[one.num_accepted for one in wanted],
                query_start_loc=[0, *np.cumsum(counts).tolist()],
                hidden_states=step.hidden_states,
                draws=draws,
            )
        )

    def _row(self, request_id: str) -> int:
        if request_id not in self._rows:
            row = self._rows[request_id] = len(self._rows)
            blocks = tuple(self._free.pop() for _ in range(self._blocks_per_row))
            self._batch.place(row, request_id, 0, (blocks,))
        return self._rows[request_id]

    def _forward(
        self,
        rows: list[int],
        computed: np.ndarray,
        counts: np.ndarray,
        token_ids: list[int],
        requirements: Requirements,
    ) -> ForwardStep:
        skeleton = self._skeleton
        attention_batch = self._batch.spans(np.array(rows, np.int64), computed, counts)
        metadata = [
            skeleton.attention.build_metadata(attention_batch, group) for group in skeleton.groups
        ]
        step = ForwardStep(metadata, self._caches, frozenset(requirements.hidden_state_layers))
        ids = torch.tensor(token_ids, dtype=torch.int64)
        skeleton.model.forward(ids, attention_batch.positions, step)
        return step

    def _allocate(self, layers: Sequence[Attention]) -> list[LayerCache]:
        backend = self._skeleton.attention
        return [
            allocate_cache(backend, layer.spec, self._num_blocks, self._device) for layer in layers
        ]
