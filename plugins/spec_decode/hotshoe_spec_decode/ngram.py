"""``ngram``: prompt lookup; what followed the last tokens where they stood before is the draft."""

from __future__ import annotations

from collections.abc import Sequence
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
    Requirements,
    hookimpl,
)
from hotshoe_spec_decode.ngram_index import NgramIndex


class NgramOptions(PluginOptions):
    """Options of the n-gram proposer."""

    min_ngram: int = Field(
        default=1, ge=1, description="fewest last tokens that have to match an earlier place"
    )
    max_ngram: int = Field(default=4, ge=1, description="most last tokens to match; tried first")
    num_draft_tokens: int = Field(
        default=12, ge=1, le=64, description="most drafts per request and step"
    )
    drafts_per_matched_token: int | None = Field(
        default=2,
        ge=1,
        description="drafts for each token of the match, however long, and one more: the further "
        "back a match reaches, the longer it goes on; none: always num_draft_tokens",
    )
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

    A draft is a function of the request's tokens alone. What is kept of a request, an index of its
    n-grams, only makes the search short.
    """

    requirements = Requirements(needs_finished_requests=True)

    def __init__(self, options: NgramOptions) -> None:
        self.max_draft_tokens = options.num_draft_tokens
        self._options = options
        self._num_tokens: dict[str, int] = {}
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        """Draft for every request that may use drafts and whose last tokens stood there before."""
        self._check_continued(inputs)
        return DraftTokens(
            token_ids=[
                self._drafts(request_id, token_ids, min(allowed, self.max_draft_tokens))
                for request_id, token_ids, allowed in zip(
                    inputs.request_ids, inputs.token_ids, inputs.max_draft_tokens, strict=True
                )
            ]
        )

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what is kept of requests that ended."""
        for request_id in request_ids:
            self._num_tokens.pop(request_id, None)
            self._indexes.pop(request_id, None)

    def _check_continued(self, inputs: ProposeInput) -> None:
        """Drop the index of a request with other tokens than those of before and new ones."""
        known = self._num_tokens
        for request_id, token_ids, num_accepted in zip(
            inputs.request_ids, inputs.token_ids, inputs.num_accepted, strict=True
        ):
            num_tokens = len(token_ids)
            num_new = num_tokens - known.get(request_id, num_tokens)
            if num_new and num_new != num_accepted + 1:
                self._indexes.pop(request_id, None)
            known[request_id] = num_tokens

    def _drafts(self, request_id: str, token_ids: NDArray[np.int32], num_wanted: int) -> list[int]:
        if num_wanted <= 0 or len(token_ids) <= self._options.min_ngram:
            return []
        index = self._indexes.get(request_id)
        if index is None or not index.is_of(token_ids):
            index = NgramIndex(self._options.max_ngram)
            self._indexes[request_id] = index
        index.extend(token_ids)
        is_latest = self._options.prefer == "latest"
        # up to the limit, a place has as many tokens behind it as are wanted
        limit = len(token_ids) - 1 - num_wanted if is_latest else None
        found = index.find(token_ids, self._options.min_ngram, limit)
        if found is None:
            return []
        start, length = found
        num_drafts = self._num_worthwhile(token_ids, start, length, num_wanted)
        drafts: list[int] = token_ids[start : start + num_drafts].tolist()
        return drafts

    def _num_worthwhile(
        self, token_ids: NDArray[np.int32], start: int, length: int, num_wanted: int
    ) -> int:
        """Drafts to copy from behind a match, which may be longer than what was looked up."""
        per_token = self._options.drafts_per_matched_token
        if per_token is None:
            return num_wanted
        before, last = start - 1, len(token_ids) - 1
        while per_token * length + 1 < num_wanted and length <= before:
            if token_ids[before - length] != token_ids[last - length]:
                break
            length += 1
        return min(per_token * length + 1, num_wanted)


def build(options: NgramOptions, context: ProposerContext) -> Proposer:
    """The proposer; it needs no facts."""
    return NgramProposer(options)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the proposer."""
    return Component(contract="spec_decode/0", factory=build, options=NgramOptions)
