"""Logits-processor contract: change the logits of the requests that ask for it, before sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsBatch:
    """The rows that a processor applies to. With drafts a request has several rows, each with its
    own history.

    Attributes:
        logits: ``[R, V]`` float32, changed in place.
        request_ids: per row.
        prompt_token_ids: per row, ``[num_prompt_tokens]`` int32.
        output_token_ids: per row, ``[num_output_tokens]`` int32, the draft prefix of the row
            included.
        extra_args: ``SamplingParams.extra_args`` per row.
    """

    logits: Tensor
    request_ids: Sequence[str]
    prompt_token_ids: Sequence[np.ndarray]
    output_token_ids: Sequence[np.ndarray]
    extra_args: Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorContext:
    """Facts a processor may be built on."""

    device: torch.device
    vocab_size: int


class LogitsProcessor(ABC):
    """Applied after penalties, biases and masks, before grammar masks, in one call per step for all
    rows that want it. Built as ``factory(options, LogitsProcessorContext)``.

    What becomes of a row must be a function of what the row shows, not of the rows beside it or of
    earlier calls: rows are recomputed after preemption, and drafts change which ones come together.
    A logit of -inf is a token that the request rules out, and stays so.
    """

    @abstractmethod
    def apply(self, batch: LogitsBatch) -> None:
        """Change ``batch.logits`` in place. If it raises, the rows are retried one by one and only
        those that raise fail.

        Raises:
            RequestError: if a request asks for something wrong, such as a value in ``extra_args``;
                anything else is a fault of the processor.
        """
