"""``ngram``: prompt lookup; what followed the last tokens where they stood before is the draft."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hotshoe.api import (
    Component,
    DraftTokens,
    PluginOptions,
    ProposeInput,
    Proposer,
    ProposerContext,
    hookimpl,
)


class NgramOptions(PluginOptions):
    """Options of the n-gram proposer."""

    min_ngram: int = Field(
        default=2, ge=1, description="fewest last tokens that have to match an earlier place"
    )
    max_ngram: int = Field(default=4, ge=1, description="most last tokens to match; tried first")
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="drafts per request and step")
    prefer: Literal["latest", "earliest"] = Field(
        default="latest",
        description="which of several equal matches to copy; latest skips those with too few "
        "tokens behind them",
    )

    @model_validator(mode="after")
    def _check_order(self) -> NgramOptions:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram is {self.min_ngram} but max_ngram is {self.max_ngram}; "
                "allowed: min_ngram up to max_ngram"
            )
        return self


class NgramProposer(Proposer):
    """Prompt lookup decoding (Saxena 2023): good where outputs repeat their prompt or themselves.

    Keeps no state: a draft is a function of the request's tokens alone.
    """

    def __init__(self, options: NgramOptions) -> None:
        self.max_draft_tokens = options.num_draft_tokens
        self._options = options

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        """Draft for every request that may use drafts and whose last tokens stood there before."""
        drafts = []
        for token_ids, allowed in zip(inputs.token_ids, inputs.max_draft_tokens, strict=True):
            num_wanted = min(allowed, self.max_draft_tokens)
            start = self._find(token_ids, num_wanted) if num_wanted > 0 else None
            drafts.append([] if start is None else token_ids[start : start + num_wanted].tolist())
        return DraftTokens(token_ids=drafts)

    def _find(self, token_ids: NDArray[np.int32], num_wanted: int) -> int | None:
        """Index of the token after the longest match, of equal ones as ``prefer`` says."""
        min_ngram = self._options.min_ngram
        num_tokens = len(token_ids)
        if num_tokens <= min_ngram:
            return None
        # ends of earlier matches; the last place itself isn't one
        ends = np.flatnonzero(token_ids[: num_tokens - 1] == token_ids[-1])
        found = None
        for length in range(1, min(self._options.max_ngram, num_tokens - 1) + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[token_ids[ends - length + 1] == token_ids[num_tokens - length]]
            if len(ends) == 0:
                break
            if length >= min_ngram:
                found = self._chosen(ends, num_tokens - 1 - num_wanted) + 1
        return found

    def _chosen(self, ends: NDArray[np.intp], last: int) -> int:
        """One of several matches; up to ``last`` they have as many tokens behind them as wanted."""
        if self._options.prefer == "earliest" or ends[0] > last:
            return int(ends[0])  # has the most tokens behind it
        return int(ends[np.searchsorted(ends, last, side="right") - 1])


def build(options: NgramOptions, context: ProposerContext) -> Proposer:
    """The proposer; it needs no facts."""
    return NgramProposer(options)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the proposer."""
    return Component(contract="spec_decode/0", factory=build, options=NgramOptions)
