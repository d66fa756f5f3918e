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

_MAX_PLACES = 8


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
        default=1,
        ge=1,
        description="drafts for each token of the match, however long, and one more: the further "
        "back a match reaches, the longer it goes on; none: always num_draft_tokens",
    )
    prefer: Literal["frequent", "latest", "earliest"] = Field(
        default="frequent",
        description="which of several equal matches to copy; frequent takes, token by token, what "
        "followed most often behind the latest eight",
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

    requirements = Requirements(needs_finished_requests=True, needs_every_step=False)

    def __init__(self, options: NgramOptions) -> None:
        self.max_draft_tokens = options.num_draft_tokens
        self._options = options
        self._max_places = _MAX_PLACES if options.prefer == "frequent" else 1
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        """Draft for every request that may use drafts and whose last tokens stood there before."""
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
            self._indexes.pop(request_id, None)

    def _drafts(self, request_id: str, token_ids: NDArray[np.int32], num_wanted: int) -> list[int]:
        options = self._options
        if num_wanted <= 0 or len(token_ids) <= options.min_ngram:
            return []
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = NgramIndex(options.max_ngram)
        index.extend(token_ids)
        length, places = index.find(
            options.min_ngram, self._max_places, latest=options.prefer != "earliest"
        )
        if not places:
            return []
        per_token = options.drafts_per_matched_token
        if per_token is None:
            return _copied(index.token_ids, places, num_wanted)
        if length == options.max_ngram:  # matches may be longer than what was looked up
            most = -(-(num_wanted - 1) // per_token)
            length, places = _longest(index.token_ids, places, length, most)
        return _copied(index.token_ids, places, min(per_token * length + 1, num_wanted))


def _longest(
    token_ids: list[int], places: Sequence[int], length: int, most: int
) -> tuple[int, list[int]]:
    """Of places behind equal runs of tokens, those behind the longest, and its length.

    Args:
        length: what all agree in.
        most: longer runs count as of this length.
    """
    agreed = length
    last = token_ids[-most:][::-1][agreed:]
    found: list[int] = []
    for place in places:
        before = token_ids[max(place - most, 0) : max(place - agreed, 0)]
        reach = agreed
        for one, other in zip(reversed(before), last, strict=False):
            if one != other:
                break
            reach += 1
        if reach > length:
            length, found = reach, []
        if reach == length:
            found.append(place)
    return length, found


def _copied(token_ids: list[int], places: Sequence[int], num_drafts: int) -> list[int]:
    """What goes on most often at some places, of equals at the latest."""
    end = len(token_ids)
    runs = [(token_ids[place : place + num_drafts], place - end) for place in places]
    drafts: list[int] = []
    for at in range(num_drafts):
        for run, offset in runs:
            if at == len(run):  # at the end, where it goes on with the drafts
                run.append(drafts[offset + at])
        token_id = runs[0][0][at]
        if len(runs) > 1:
            following = [run[at] for run, _ in reversed(runs)]
            token_id = max(following, key=following.count)
            runs = [one for one in runs if one[0][at] == token_id]
        drafts.append(token_id)
    return drafts


def build(options: NgramOptions, context: ProposerContext) -> Proposer:
    """The proposer; it needs no facts."""
    return NgramProposer(options)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the proposer."""
    return Component(contract="spec_decode/0", factory=build, options=NgramOptions)
