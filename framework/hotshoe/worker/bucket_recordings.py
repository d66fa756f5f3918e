"""Recorded steps of a few sizes, made at start-up, to which steps are padded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from hotshoe.api import LayerCache, NotRecordableError, Recording
from hotshoe.api.layers import ForwardStep
from hotshoe.worker.batch import StepInputs
from hotshoe.worker.recordings import RecordedParts
from hotshoe.worker.staged_batch import StagedBatch

logger = logging.getLogger(__name__)

_MAX_DEFAULT_SIZE = 256  # of larger steps, what Python costs is a small part


class BucketRecordings:
    """Recordings of embedding to logits for steps in which each request has one token, and wants
    the next.

    Args:
        parts: of the model; the attention takes padding.
        caches: by layer; they must stay the same tensors.
        batch: whose steps these are. It pads them once ``record`` has said to which sizes.
    """

    def __init__(
        self, parts: RecordedParts, caches: Sequence[LayerCache], batch: StagedBatch
    ) -> None:
        self._parts = parts
        self._caches = caches
        self._batch = batch
        self._layers = sorted(parts.hidden_state_layers)
        self._recordings: dict[int, Recording] = {}

    @torch.inference_mode()
    def record(self, sizes: Sequence[int]) -> None:
        """Record steps of some sizes, the largest first: the others fit into its memory."""
        started = perf_counter()
        in_order = sorted(sizes, reverse=True)
        is_shown = sys.stderr.isatty()
        with tqdm(in_order, desc="recording steps", disable=not is_shown, leave=False) as bar:
            for size in bar:
                try:
                    self._recordings[size] = self._record(size)
                except NotRecordableError as error:
                    logger.info("forward passes are run op by op, not recorded: %s", error)
                    self._recordings.clear()
                    return
        self._batch.buckets = in_order[::-1]
        logger.info(
            "recorded steps of %s requests in %.1f s",
            ", ".join(map(str, self._batch.buckets)),
            perf_counter() - started,
        )

    def run(self, inputs: StepInputs) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Logits of a step, ``[num_tokens, vocab_size]``, and the hidden states that are wanted;
        None if it has to be run op by op.

        The logits are overwritten by the next replay; the hidden states are not.
        """
        if inputs.bucket is None:
            return None
        recording = self._recordings[inputs.bucket]
        recording.replay()
        num_reqs = len(inputs.rows)
        logits, *states = recording.outputs
        return logits[:num_reqs], {
            layer: state[:num_reqs].clone()
            for layer, state in zip(self._layers, states, strict=True)
        }

    def _record(self, size: int) -> Recording:
        parts, batch = self._parts, self._batch
        inputs = batch.open_bucket(size)

        def forward() -> tuple[Tensor, ...]:
            # tables and newest tokens change between replays, so looking them up is recorded too
            token_ids = batch.filled(inputs.token_ids, inputs.rows)
            metadata = [
                parts.attention.build_metadata(batch.bucket_batch(size, group), spec)
                for group, spec in enumerate(parts.groups)
            ]
            step = ForwardStep(metadata, self._caches, parts.hidden_state_layers)
            hidden = parts.model.forward(token_ids, inputs.positions, step)
            states = [step.hidden_states[layer] for layer in self._layers]
            return parts.model.compute_logits(hidden), *states

        return parts.kernels.record(forward)


def bucket_sizes(wanted: Sequence[int] | None, max_num_seqs: int) -> tuple[int, ...]:
    """Sizes of recorded steps, in ascending order.

    Args:
        wanted: ``kernels.record_batch_sizes``; None = its default.
        max_num_seqs: most requests of a step, so no size is larger.
    """
    if wanted is None:
        most = min(max_num_seqs, _MAX_DEFAULT_SIZE)
        steps = (1, 2, 4, *range(8, 32, 8), *range(32, _MAX_DEFAULT_SIZE + 1, 16))
        wanted = (*(size for size in steps if size < most), most)
    return tuple(sorted({min(size, max_num_seqs) for size in wanted}))
