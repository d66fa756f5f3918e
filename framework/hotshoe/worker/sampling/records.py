"""What goes into one round of sampling and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from numpy.typing import NDArray

from hotshoe.api.guided_decoding import Grammar, GuidedDecodingBackend
from hotshoe.api.types import PositionLogprobs

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# R=number of sampled positions, V=vocab_size, k_i=drafts of request i; R = sum(k_i + 1)


class SamplingStep(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a step that need tokens, one entry each, with the logits of their positions.

    Attributes:
        rows: batch row of each request.
        request_ids: their ids.
        draft_token_ids: drafts to be verified per request, mostly none.
        logits: ``[R, V]``, any float type; request i has the position after its last committed
            token, then one after each of its drafts. May be overwritten.
        token_ids: ``[max_num_seqs, max_len]`` int32, the committed tokens by batch row.
        num_tokens: ``[max_num_seqs]``, committed tokens by batch row, prompt included, before
            this step's new ones.
        num_prompt_tokens: ``[max_num_seqs]``, by batch row.
        grammars: matcher by batch row, advanced over all committed output tokens; this step
            advances it over the new ones.
        grammar_backends: whose they are, by batch row; masks of one backend are filled together.
    """

    rows: Sequence[int]
    request_ids: Sequence[str]
    draft_token_ids: Sequence[Sequence[int]]
    logits: Tensor
    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.integer]
    num_prompt_tokens: NDArray[np.integer]
    grammars: Mapping[int, Grammar] = {}
    grammar_backends: Mapping[int, GuidedDecodingBackend] = {}


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome, in the order of ``SamplingStep.rows``.

    Attributes:
        token_ids: per request 1 to ``k_i + 1`` tokens: the accepted drafts plus one; none for a
            request in ``errors``.
        logprobs: by index, for requests that ask for them, one entry per new token.
        errors: by index, why a request got no token.
        error_fields: by index, for errors that are the request's own fault: the sampling parameter.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[PositionLogprobs]] = {}
    errors: dict[int, str] = {}
    error_fields: dict[int, str] = {}
