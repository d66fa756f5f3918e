"""The largest step that a worker may be asked for, run on made-up tokens to see what it takes."""

# T=num_tokens R=num_reqs S=requests that sample

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    KVCacheSpec,
    LayerCache,
    Model,
    NewRequest,
    SamplingParams,
)
from hotshoe.api.layers import ForwardStep
from hotshoe.worker.sampling import SamplingStep, TokenSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """A step as large as they come: prompts of ``max_model_len`` tokens, as many as its tokens
    allow, and sampling for every row.

    Attributes:
        model: with weights.
        attention: of its layers, which belong to ``groups``.
        caches: by layer, of at least one block. All tokens are written to the first.
        hidden_state_layers: that a drafter wants.
        tokens: whose rows are free, and are so again afterwards.
    """

    model: Model
    attention: AttentionBackend
    groups: Sequence[KVCacheSpec]
    caches: Sequence[LayerCache]
    hidden_state_layers: frozenset[int]
    tokens: TokenSampler
    device: torch.device
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def run(self) -> None:
        """Run it, and wait for its tokens."""
        batch = self._batch()
        num_tokens = len(batch.positions)
        metadata = [self.attention.build_metadata(batch, group) for group in self.groups]
        step = ForwardStep(metadata, self.caches, self.hidden_state_layers)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self.model.forward(token_ids, batch.positions, step)
        num_rows = min(self.max_num_seqs, num_tokens)
        self._sample(self.model.compute_logits(hidden[:num_rows].clone()))

    def _batch(self) -> AttentionBatch:
        num_left = min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)
        num_whole, rest = divmod(num_left, self.max_model_len)
        lengths = [self.max_model_len] * num_whole + [rest] * bool(rest)
        positions = np.concatenate([np.arange(length) for length in lengths])
        num_blocks = -(-max(lengths) // self.block_size)
        table = torch.zeros((len(lengths), num_blocks), dtype=torch.int32, device=self.device)
        return AttentionBatch(
            query_start_loc=self._tensor(np.cumsum([0, *lengths]).astype(np.int32)),
            seq_lens=self._tensor(np.array(lengths, np.int32)),
            block_table=table,
            slot_mapping=self._tensor(positions % self.block_size),
            positions=self._tensor(positions),
            block_size=self.block_size,
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            query_lens_list=lengths,
            seq_lens_list=lengths,
        )

    def _sample(self, logits_SV: Tensor) -> None:
        """Draw for every row, with what takes the most memory of all that is common."""
        rows = list(range(len(logits_SV)))
        params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, logprobs=0)
        for row in rows:
            request = NewRequest(str(row), row, [0], params, 0, 0, 0, ())
            self.tokens.add_row(row, request)
        ones = np.ones(self.max_num_seqs, np.int64)
        self.tokens.sample(
            SamplingStep(
                rows=rows,
                request_ids=[str(row) for row in rows],
                draft_token_ids=[[] for _ in rows],
                logits=logits_SV,
                token_ids=np.zeros((self.max_num_seqs, 1), np.int32),
                num_tokens=ones,
                num_prompt_tokens=ones,
            )
        )
        for row in rows:
            self.tokens.remove_row(row)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
