"""``DraftModelProposer``: a model of its own, on the target's blocks, one token ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    DraftPass,
    DraftTarget,
    DraftTokens,
    Kernels,
    Model,
    ModelLoadError,
    ProposeInput,
    Proposer,
    ProposerContext,
    Requirements,
)
from hotshoe_spec_decode.chains import ChainDrafter, Run, Tensors, num_drafts_of
from hotshoe_spec_decode.draft_model import DraftModelOptions
from hotshoe_spec_decode.put_off import PutOffBlocks
from hotshoe_spec_decode.weights import load_model

_MAX_PUT_OFF_BLOCKS = 1 << 16


@dataclass(slots=True)
class _Progress:
    """How far the model has come with a request.

    Attributes:
        num_computed: tokens from the first on that it has cached.
        num_target: tokens that the target had cached after the step before.
        num_drafted: tokens drafted then, of which it has cached all but the last.
    """

    num_computed: int
    num_target: int
    num_drafted: int


class DraftModelProposer(Proposer):
    """Catches up with the tokens that were kept and drafts on from the last one.

    What it has cached of drafts that were accepted stays. While a request drafts nothing its tokens
    wait, until they complete a block, which other requests may share, or it drafts again. Those of
    a dormant request wait until a request drafts that has these blocks, this one or another.
    """

    def __init__(self, options: DraftModelOptions, context: ProposerContext) -> None:
        target = context.require_target()
        self._path = options.model
        self._open_checkpoint = target.open_checkpoint
        self.max_draft_tokens = options.num_draft_tokens
        self._max_model_len = context.max_model_len
        self._block_size = context.block_size
        with target.open_checkpoint(options.model) as checkpoint:
            self._model = target.build_model(checkpoint)
        self._check_vocabulary(target)
        kernels, vocab_size = target.kernels, context.vocab_size
        self._drafter = ChainDrafter(
            target.forwards, kernels, _ModelLayers(self._model, kernels, vocab_size)
        )
        if self._model.vocab_size < vocab_size:
            target_ids = torch.arange(self._model.vocab_size, device=context.device)
            self._drafter.use_vocabulary(target_ids)
        self.requirements = Requirements(
            num_lookahead_slots=options.num_draft_tokens, needs_finished_requests=True
        )
        self._progress: dict[str, _Progress] = {}
        self._put_off: PutOffBlocks[None] = PutOffBlocks(
            block_size=context.block_size, num_following=0, max_blocks=_MAX_PUT_OFF_BLOCKS
        )
        self._has_gaps: set[str] = set()  # requests that may have blocks that were put off

    def _check_vocabulary(self, target: DraftTarget) -> None:
        own, other = target.read_tokens(self._path), target.read_tokens()
        sizes = f"{self._model.vocab_size} and {target.model.vocab_size}"
        if own is None or other is None:
            if self._model.vocab_size != target.model.vocab_size:
                raise ModelLoadError(
                    f"draft model {self._path!r} and the target have vocabularies of {sizes} "
                    "tokens; choose one with the target's tokenizer"
                )
            return
        # sizes may differ all the same: those of models are padded in different ways
        for token_id, (drafted, expected) in enumerate(zip(own, other, strict=False)):
            if drafted != expected:
                raise ModelLoadError(
                    f"token {token_id} of draft model {self._path!r} is {drafted!r} and the "
                    f"target's is {expected!r}; choose one with the target's tokenizer"
                )

    def load_weights(self) -> None:
        with self._open_checkpoint(self._path) as checkpoint:
            load_model(checkpoint, self._model)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._progress.pop(request_id, None)
            self._has_gaps.discard(request_id)
        self._put_off.forget(request_ids)

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        runs = self._runs(inputs)
        if not runs:
            return DraftTokens(token_ids=[[] for _ in inputs.request_ids])
        histories = [inputs.token_ids[run.request][run.first : run.end] for run in runs]
        # ids that only the target has are padding: as inputs they are as good as any other
        ids = np.minimum(np.concatenate(histories).astype(np.int64), self._model.vocab_size - 1)
        return self._drafter.propose(inputs, runs, torch.from_numpy(ids))

    # -- which tokens -----------------------------------------------------------------------

    def _runs(self, inputs: ProposeInput) -> list[Run]:
        """Tokens to compute in this step."""
        counts = [
            num_drafts_of(
                inputs,
                request,
                max_draft_tokens=self.max_draft_tokens,
                max_model_len=self._max_model_len,
            )
            for request in range(len(inputs.request_ids))
        ]
        depth = max(counts, default=0)
        runs: list[Run] = []
        for request, request_id in enumerate(inputs.request_ids):
            start, num_computed = self._start(inputs, request), inputs.num_computed_tokens[request]
            if start is None:
                self._progress.pop(request_id, None)
                continue
            end = start
            if counts[request]:
                end = num_computed + 1
            elif start // self._block_size != num_computed // self._block_size:
                if inputs.is_dormant and inputs.is_dormant[request]:
                    self._put_off_blocks(inputs, request)
                else:
                    end = num_computed
            if end > start:
                if request_id in self._has_gaps:
                    start = self._first_gap(inputs, request, start)
                runs.append(Run(request, start, end, counts[request]))
            self._progress[request_id] = _Progress(
                num_computed=end,
                num_target=num_computed,
                num_drafted=depth if counts[request] else 0,
            )
        return runs

    def _start(self, inputs: ProposeInput, request: int) -> int | None:
        """How many tokens from the first on the model has cached."""
        num_drafted, num_accepted = inputs.num_drafted[request], inputs.num_accepted[request]
        if inputs.num_computed_tokens[request] >= len(inputs.token_ids[request]):
            return None  # its last token isn't known: the request has failed
        first = _first_position(inputs, request)
        progress = self._progress.get(inputs.request_ids[request])
        # a gap means another life of a request that was preempted: what it shares is computed
        if progress is None or progress.num_target != first:
            if first and len(self._put_off):
                self._has_gaps.add(inputs.request_ids[request])
            return first
        if not num_drafted:
            return min(progress.num_computed, first)
        return progress.num_computed + min(num_accepted, progress.num_drafted - 1)

    def _put_off_blocks(self, inputs: ProposeInput, request: int) -> None:
        """Blocks that were completed in this step."""
        request_id, token_ids = inputs.request_ids[request], inputs.token_ids[request]
        first = _first_position(inputs, request)
        end = inputs.num_computed_tokens[request]
        for block in range(first // self._block_size, end // self._block_size):
            self._put_off.put(request_id, token_ids, block, None)
        self._has_gaps.add(request_id)

    def _first_gap(self, inputs: ProposeInput, request: int, start: int) -> int:
        """Where to compute from, so that no block stays put off."""
        request_id, token_ids = inputs.request_ids[request], inputs.token_ids[request]
        self._has_gaps.discard(request_id)
        num_blocks = inputs.num_computed_tokens[request] // self._block_size
        blocks = self._put_off.take(request_id, token_ids, num_blocks)
        return min(start, blocks[0][0] * self._block_size) if blocks else start


def _first_position(inputs: ProposeInput, request: int) -> int:
    """Of the tokens that the target computed in this step."""
    begin, end = inputs.query_start_loc[request : request + 2]
    num_refused = inputs.num_drafted[request] - inputs.num_accepted[request]
    return inputs.num_computed_tokens[request] - (end - begin - num_refused)


class _ModelLayers:
    """A whole model as a drafter's layers; no pass leaves anything to the next.

    Args:
        vocab_size: of the target; what the model has more is never drafted.
    """

    def __init__(self, model: Model, kernels: Kernels, vocab_size: int) -> None:
        self._model = model
        self._kernels = kernels
        self._vocab_size = vocab_size

    def cache(self, entries: DraftPass, token_ids: Tensor, inputs: Tensors) -> Tensors:
        return (self._model.forward(token_ids, entries.positions, entries.step),)

    def begin(
        self, entries: DraftPass, token_ids: Tensor, last_rows: Tensor, inputs: Tensors
    ) -> tuple[Tensor, Tensors]:
        (hidden,) = self.cache(entries, token_ids, inputs)
        if hidden.shape[0] != last_rows.shape[0]:  # else it's the rows that the step wants
            hidden = self._kernels.take_rows(hidden, last_rows)
        return self._logits(hidden), ()

    def go_on(self, entry: DraftPass, token_ids: Tensor, inputs: Tensors) -> tuple[Tensor, Tensors]:
        (hidden,) = self.cache(entry, token_ids, inputs)
        return self._logits(hidden), ()

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        if logits.shape[1] <= self._vocab_size:
            return logits
        return self._kernels.concat([logits[:, : self._vocab_size]])
