"""Logits-processor plugins: who gets them, and what happens when one raises.

What requests can ask for without a plugin (``edits.py``, ``penalties.py``) doesn't go this way: it
can't raise, so it needs no copy of the rows, and it reads no whole histories.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotshoe.api.logits_processor import LogitsBatch, LogitsProcessor
from hotshoe.api.sampling_params import SamplingParams
from hotshoe.errors import RequestError, SamplingParamsError
from hotshoe.worker.sampling.rows import Feature

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout

Processors = Mapping[str, tuple[LogitsProcessor, bool]]
"""By name: the processor, and whether it applies to every request."""


def check_logits_processors(params: SamplingParams, names: Collection[str]) -> None:
    """Refuse a request that names a processor which isn't loaded.

    Args:
        params: of the request.
        names: the loaded processors.

    Raises:
        SamplingParamsError: naming the first unknown one and those that are loaded.
    """
    for name in params.logits_processors:
        if name not in names:
            loaded = ", ".join(sorted(names)) or "none"
            raise SamplingParamsError(
                "logits_processors",
                name,
                f"loaded processors: {loaded}; load more through sampler.logits_processors",
            )


class ProcessorChain:
    """Applies the processors in the order in which they were configured."""

    def __init__(self, processors: Processors) -> None:
        self._processors = dict(processors)
        self._has_always = any(is_always for _, is_always in self._processors.values())

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether any processor concerns a request."""
        return self._has_always or bool(params.logits_processors)

    def apply(
        self,
        logits: Tensor,
        layout: Layout,
        step: SamplingStep,
        errors: dict[int, str],
        fields: dict[int, str],
    ) -> None:
        """Process the rows of the requests that ask for it, in place.

        Args:
            logits: ``[R, V]`` float32.
            layout: of the step.
            step: whose tokens are the histories.
            errors: by logits row; what a processor raised is added, and that row is left as it was.
            fields: by logits row; the parameter of the request that a ``RequestError`` is about.
        """
        indices = layout.requests_with(Feature.LOGITS_PROCESSORS)
        for name, (processor, is_always) in self._processors.items():
            rows = [
                row
                for index in indices
                if is_always or name in _params(layout, index).logits_processors
                for row in layout.positions(index)
                if row not in errors
            ]
            if not rows:
                continue
            for row, error in _apply_one(processor, rows, logits, layout, step).items():
                errors[row] = _failure(name, error)
                if isinstance(error, RequestError):
                    fields[row] = error.field or "extra_args"


def _apply_one(
    processor: LogitsProcessor,
    rows: list[int],
    logits: Tensor,
    layout: Layout,
    step: SamplingStep,
) -> dict[int, Exception]:
    """Run one processor over all rows at once, or row by row if it can't; the errors by row."""
    rows_changed = _RowsChanged(logits, rows, layout)
    try:
        processor.apply(_batch(rows_changed.logits, rows, layout, step))
    except Exception as error:
        rows_changed.take_back()
        if len(rows) == 1:
            return {rows[0]: error}
        errors: dict[int, Exception] = {}
        for row in rows:
            errors.update(_apply_one(processor, [row], logits, layout, step))
        return errors
    rows_changed.keep()
    return {}


class _RowsChanged:
    """Ascending rows of logits while a processor changes them. Neighbours are changed where they
    are, which takes one copy, for the case that it raises; others take one there and one back.
    """

    def __init__(self, logits: Tensor, rows: list[int], layout: Layout) -> None:
        self._target = logits
        self._where: Tensor | None = None
        self._before: Tensor | None = None
        if rows[-1] - rows[0] == len(rows) - 1:
            self.logits = logits[rows[0] : rows[-1] + 1]
            self._before = self.logits.clone()
        else:
            self._where = layout.transfers.stage(np.array(rows, dtype=np.int64))
            self.logits = logits[self._where]

    def keep(self) -> None:
        """Put the changes in place."""
        if self._where is not None:
            self._target[self._where] = self.logits

    def take_back(self) -> None:
        """Undo them."""
        if self._before is not None:
            self.logits.copy_(self._before)


def _failure(name: str, error: Exception) -> str:
    if isinstance(error, RequestError):
        return f"logits processor {name!r}: {error}"
    return f"logits processor {name!r} failed with {type(error).__name__}: {error}"


def _params(layout: Layout, index: int) -> SamplingParams:
    return layout.table.request(layout.rows[index]).sampling_params


def _batch(logits: Tensor, rows: list[int], layout: Layout, step: SamplingStep) -> LogitsBatch:
    indices = layout.request_index[rows].tolist()
    num_drafts = layout.num_drafts_before[rows].tolist()
    histories = [
        _history(step, layout, index, num) for index, num in zip(indices, num_drafts, strict=True)
    ]
    return LogitsBatch(
        logits=logits,
        request_ids=[step.request_ids[index] for index in indices],
        prompt_token_ids=[prompt for prompt, _ in histories],
        output_token_ids=[output for _, output in histories],
        extra_args=[_params(layout, index).extra_args for index in indices],
    )


def _history(
    step: SamplingStep, layout: Layout, index: int, num_drafts: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompt and output of a row; read-only, because they are the batch's own memory."""
    row = layout.rows[index]
    committed = step.token_ids[row, : int(step.num_tokens[row])]
    committed.flags.writeable = False
    prompt, output = np.split(committed, [int(step.num_prompt_tokens[row])])
    if num_drafts:
        drafts = np.array(step.draft_token_ids[index][:num_drafts], dtype=np.int32)
        output = np.concatenate((output, drafts))
    return prompt, output
