"""``EagleProposer``: entries of every step into the head's KV cache, and chains of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotshoe.api import (
    DraftSpans,
    DraftTokens,
    ProposeInput,
    Proposer,
    ProposerContext,
    Requirements,
)
from hotshoe_spec_decode.chains import ChainDrafter, Run, Tensors, num_drafts_of
from hotshoe_spec_decode.eagle import EagleOptions
from hotshoe_spec_decode.eagle.config import EagleConfig
from hotshoe_spec_decode.eagle.head import EagleHead
from hotshoe_spec_decode.put_off import PutOffBlocks

_MAX_PUT_OFF_BYTES = 64 << 20


@dataclass(slots=True)
class _Run(Run):
    """Entries of one request that the head has not cached yet.

    Attributes:
        rows: those of the step, first and after the last; the last entries of the run.
        held: features of the entries before, by step and layer.
    """

    rows: tuple[int, int]
    held: list[Tensors]


@dataclass(slots=True)
class _Held:
    """Features of entries that wait, by step and layer, and their positions."""

    first: int
    end: int
    features: list[Tensors]


@dataclass(frozen=True, slots=True)
class _Entries:
    """Features of the entries of a block, from one of them on, by layer."""

    first: int
    features: Tensors


class EagleProposer(Proposer):
    """EAGLE: entry i is made of the target's feature of token i and of token i + 1, attends to the
    entries before, and predicts token i + 2; the next entry takes the layer's own output for the
    feature that the target hasn't computed yet.

    In each step one pass caches the entries of all tokens that were kept, and goes on to draft in
    the same call. Entries of tokens that were refused need no undoing: a later pass writes to their
    slots before anything attends to them, as an entry attends to positions up to its own, and the
    positions between the last kept token and its own are its pass's, or an earlier one's of the
    same chain.

    While a request drafts nothing its entries wait, until they complete a block, which other
    requests may share, or it drafts again. Those of a dormant request go on waiting, as whole
    blocks, until a request drafts that has these blocks, this one or another.
    """

    def __init__(self, options: EagleOptions, context: ProposerContext) -> None:
        target = context.require_target()
        self._path = options.model
        self.max_draft_tokens = options.num_draft_tokens
        self._max_model_len = context.max_model_len
        self._block_size = context.block_size
        with target.open_checkpoint(options.model) as checkpoint:
            config = EagleConfig.read(checkpoint, target.config.get("num_hidden_layers"))
            layers = target.make_layers(checkpoint.format)
        self._head = EagleHead(
            config, target, layers, max_model_len=context.max_model_len, device=context.device
        )
        self._drafter = ChainDrafter(target.forwards, layers.kernels, self._head)
        self._layers = config.feature_layers
        self.requirements = Requirements(
            hidden_state_layers=tuple(sorted(set(self._layers))),
            num_lookahead_slots=options.num_draft_tokens - 1,  # the first draft takes no entry more
            needs_finished_requests=True,
            reads_next_token=True,
        )
        self._held: dict[str, _Held] = {}
        bytes_per_block = (
            len(self._layers)
            * target.model.hidden_size
            * target.dtype.itemsize
            * context.block_size
        )
        self._put_off: PutOffBlocks[_Entries] = PutOffBlocks(
            block_size=context.block_size,
            num_following=1,
            max_blocks=_MAX_PUT_OFF_BYTES // bytes_per_block + 1,
        )
        self._has_gaps: set[str] = set()  # requests that may have blocks that were put off
        self._ends: dict[str, int] = {}  # positions after the last ones seen

    def load_weights(self) -> None:
        self._head.load(self._path)
        if self._head.target_ids is not None:
            self._drafter.use_vocabulary(self._head.target_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._has_gaps.discard(request_id)
            self._ends.pop(request_id, None)
        self._put_off.forget(request_ids)

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        runs = self._runs(inputs)
        if not runs:
            return DraftTokens(token_ids=[[] for _ in inputs.request_ids])
        features = self._features(inputs, runs)
        token_ids = np.zeros(features[0].shape[0], np.int64)
        at = 0
        for run in runs:
            count = run.end - run.first
            history = inputs.token_ids[run.request]
            token_ids[at : at + count] = history[run.first + 1 : run.end + 1]
            at += count + run.num_spare
        return self._drafter.propose(inputs, runs, torch.from_numpy(token_ids), *features)

    # -- which entries ----------------------------------------------------------------------

    def _runs(self, inputs: ProposeInput) -> list[_Run]:
        """Entries to cache in this step."""
        runs: list[_Run] = []
        for request, request_id in enumerate(inputs.request_ids):
            run = self._run(inputs, request, self._held.pop(request_id, None))
            if run is None:
                continue
            if not run.num_drafts:
                is_whole = run.first // self._block_size != run.end // self._block_size
                is_dormant = inputs.is_dormant and inputs.is_dormant[request]
                if not is_whole or is_dormant:
                    self._hold(request_id, run, inputs)
                    if is_whole:
                        self._put_off_blocks(request_id, inputs.token_ids[request])
                    continue
            if request_id in self._has_gaps:
                self._fill_gaps(inputs, run)
            runs.append(run)
        return runs

    def _run(self, inputs: ProposeInput, request: int, held: _Held | None) -> _Run | None:
        begin, end = inputs.query_start_loc[request : request + 2]
        end -= inputs.num_drafted[request] - inputs.num_accepted[request]
        num_computed = inputs.num_computed_tokens[request]
        if begin >= end or num_computed >= len(inputs.token_ids[request]):
            return None  # its last token isn't known: the request has failed
        first = num_computed - (end - begin)
        request_id = inputs.request_ids[request]
        if first and self._ends.get(request_id) != first and len(self._put_off):
            self._has_gaps.add(request_id)
        self._ends[request_id] = num_computed
        num_drafts = num_drafts_of(
            inputs,
            request,
            max_draft_tokens=self.max_draft_tokens,
            max_model_len=self._max_model_len,
        )
        # what waits belongs to an earlier life of a request that was preempted if there's a gap
        if held is None or held.end != first:
            return _Run(request, first, num_computed, num_drafts, (begin, end), [])
        return _Run(request, held.first, num_computed, num_drafts, (begin, end), held.features)

    def _hold(self, request_id: str, run: _Run, inputs: ProposeInput) -> None:
        begin, end = run.rows
        states = self._states(inputs)
        if end - begin < states[0].shape[0]:
            states = [state[begin:end] for state in states]
        run.held.append(states)
        self._held[request_id] = _Held(run.first, run.end, run.held)

    def _states(self, inputs: ProposeInput) -> list[Tensor]:
        return [inputs.hidden_states[layer] for layer in self._layers]

    # -- entries of dormant requests --------------------------------------------------------

    def _put_off_blocks(self, request_id: str, token_ids: NDArray[np.int32]) -> None:
        """Entries that were held, as far as they complete blocks."""
        held, size = self._held.pop(request_id), self._block_size
        features = _joined(held.features)
        first = held.first
        while first // size != held.end // size:
            block = first // size
            last = (block + 1) * size
            rows = slice(first - held.first, last - held.first)
            entries = _Entries(first, [feature[rows] for feature in features])
            self._put_off.put(request_id, token_ids, block, entries)
            first = last
        self._has_gaps.add(request_id)
        if first < held.end:
            # a copy, which doesn't keep the others alive
            rest = [feature[first - held.first :].clone() for feature in features]
            self._held[request_id] = _Held(first, held.end, [rest])

    def _fill_gaps(self, inputs: ProposeInput, run: _Run) -> None:
        """Cache entries of blocks before a run that were put off, by this request or another."""
        request_id, token_ids = inputs.request_ids[run.request], inputs.token_ids[run.request]
        self._has_gaps.discard(request_id)
        found = self._put_off.take(request_id, token_ids, run.first // self._block_size)
        runs: list[list[_Entries]] = []
        end = -1
        for block, entries in found:
            if entries.first != end:
                runs.append([])
            runs[-1].append(entries)
            end = (block + 1) * self._block_size
        for several in runs:
            first = several[0].first
            features = _joined([one.features for one in several])
            count = features[0].shape[0]
            span = DraftSpans(
                requests=[run.request], first_positions=[first], num_tokens=[count], num_wanted=[0]
            )
            next_ids = token_ids[first + 1 : first + 1 + count].astype(np.int64)
            self._drafter.cache(span, torch.from_numpy(next_ids), *features)

    def _features(self, inputs: ProposeInput, runs: list[_Run]) -> Tensors:
        """By layer, of all entries of the runs."""
        states = self._states(inputs)
        if any(run.held for run in runs):
            pieces: list[Tensors] = []
            for run in runs:
                pieces += run.held
                pieces.append([state[slice(*run.rows)] for state in states])
            return _joined(pieces)
        if len(runs) == len(inputs.request_ids):
            # those of refused tokens are computed in vain: that takes no longer than to pick the
            # others, and passes come in fewer sizes
            for run in runs:
                run.num_spare = inputs.num_drafted[run.request] - inputs.num_accepted[run.request]
            return states
        rows = np.concatenate([np.arange(*run.rows) for run in runs])
        kept = torch.from_numpy(rows).to(states[0].device)
        return [state.index_select(0, kept) for state in states]


def _joined(pieces: Sequence[Tensors]) -> Tensors:
    """One behind the other, by layer."""
    if len(pieces) == 1:
        return pieces[0]
    return [torch.cat(several) for several in zip(*pieces, strict=True)]
