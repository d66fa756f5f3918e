"""``no_repeat_ngram``: no sequence of so many tokens comes twice in an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from hotshoe.api import (
    Component,
    LogitsBatch,
    LogitsProcessor,
    LogitsProcessorContext,
    PluginOptions,
    RequestError,
    hookimpl,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZE = "no_repeat_ngram_size"
"""The key in a request's ``extra_args``."""


class NoRepeatOptions(PluginOptions):
    """What users may write under this processor's ``options``; anything else is refused."""

    size: int = Field(
        default=3,
        ge=0,
        description="tokens in a sequence that may not come twice, for requests that don't say "
        "extra_args.no_repeat_ngram_size; 0 = any may",
    )
    include_prompt: bool = Field(
        default=False, description="whether a sequence of the prompt may not come again either"
    )


class NoRepeatNgram(LogitsProcessor):
    """Masks each token that would complete a sequence which is there already.

    A row's history holds its draft prefix, so drafts need no thought here. Nothing is kept between
    calls: a row is what it shows.
    """

    def __init__(self, options: NoRepeatOptions) -> None:
        self._options = options

    def apply(self, batch: LogitsBatch) -> None:
        rows: list[int] = []
        token_ids: list[int] = []
        for row, extra_args in enumerate(batch.extra_args):
            history = batch.output_token_ids[row]
            if self._options.include_prompt:
                history = np.concatenate((batch.prompt_token_ids[row], history))
            banned = completing(history, self._size(extra_args))
            rows += [row] * len(banned)
            token_ids += banned
        batch.logits[rows, token_ids] = float("-inf")  # once for all rows: a call costs

    def _size(self, extra_args: Mapping[str, Any] | None) -> int:
        size = (extra_args or {}).get(SIZE, self._options.size)
        if type(size) is not int or size < 0:
            raise RequestError(
                f"extra_args.{SIZE} is {size!r}; allowed: a whole number >= 0", field="extra_args"
            )
        return size


def completing(history: NDArray[np.int32], size: int) -> list[int]:
    """What stands behind each earlier place of the last ``size - 1`` tokens."""
    num_places = len(history) - size + 1  # sequences that are there already
    if size == 0 or num_places < 1:
        return []
    is_same = np.ones(num_places, dtype=bool)
    for offset, token_id in enumerate(history[num_places:]):
        is_same &= history[offset : offset + num_places] == token_id
    return list(set(history[size - 1 :][is_same].tolist()))


def build(options: NoRepeatOptions, context: LogitsProcessorContext) -> NoRepeatNgram:
    """Make the processor, once per worker."""
    return NoRepeatNgram(options)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the plugin."""
    return Component(contract="logits_processor/0", factory=build, options=NoRepeatOptions)
