"""``StartedSampling``: what is left to do once the drawn tokens are on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotshoe.errors import PluginContractError
from hotshoe.worker.sampling import grammars
from hotshoe.worker.sampling.logprobs import Scores
from hotshoe.worker.sampling.records import SampledTokens, SamplingStep
from hotshoe.worker.sampling.rows import Feature, Layout
from hotshoe.worker.sampling.verify import verify

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.api.guided_decoding import Grammar

_MASKING = {
    Feature.ALLOWED_TOKENS: "allowed_token_ids",
    Feature.BAD_WORDS: "bad_words",
    Feature.MIN_TOKENS: "min_tokens",
    Feature.LOGITS_PROCESSORS: "logits processors",
}
_PARAMETERS = ("allowed_token_ids", "bad_words", "min_tokens")


@dataclass(slots=True)
class Faults:
    """What failed, by logits row.

    Attributes:
        errors: why.
        fields: the sampling parameter that is at fault, if one is.
    """

    errors: dict[int, str] = field(default_factory=dict)
    fields: dict[int, str] = field(default_factory=dict)


class StartedSampling:
    """Tokens that are being drawn. Rows may get other requests before ``finish`` is called; it's
    about those that were there.

    Attributes:
        token_ids: ``[R]`` int64 on the device, what is drawn at each position, whether or not the
            draft before it will turn out right; something within the vocabulary where a request
            fails.
    """

    def __init__(
        self,
        token_ids: Tensor,
        arrive: Callable[[], Sequence[Tensor]],
        step: SamplingStep,
        layout: Layout,
        faults: Faults,
        scores: Scores | None,
        *,
        sampler_name: str,
        vocab_size: int,
    ) -> None:
        self.token_ids = token_ids
        self._arrive = arrive
        self._draft_token_ids = step.draft_token_ids
        self._layout = layout
        self._faults = faults
        self._scores = scores
        self._sampler_name = sampler_name
        self._vocab_size = vocab_size
        self._grammars: list[tuple[int, Grammar]] = []
        if step.grammars:
            self._grammars += [
                (index, step.grammars[step.rows[index]])
                for index in grammars.constrained_requests(step)
            ]

    def finish(self) -> SampledTokens:
        """Wait for the tokens and verify them. Called once.

        Raises:
            PluginContractError: if the sampler drew something that isn't a token id.
        """
        token_ids, best, *scores = self._arrive()
        drawn = checked_token_ids(token_ids, self._sampler_name, self._vocab_size)
        self._check_best(best)
        sampled = SampledTokens(token_ids=verify(self._draft_token_ids, drawn))
        if self._faults.errors:
            self._cut_at_errors(sampled)
        if self._grammars:
            self._advance_grammars(sampled)
        if self._scores is not None:
            self._describe(sampled, self._scores, scores)
        return sampled

    def _check_best(self, best: Tensor) -> None:
        """Find rows whose largest logit isn't a number that can be worked with."""
        values = best.tolist()
        # in float64, finite values of float32 have a finite sum
        if math.isfinite(sum(values)):
            return
        errors, fields = self._faults.errors, self._faults.fields
        for row in [at for at, value in enumerate(values) if not math.isfinite(value)]:
            if row in errors:
                continue
            if values[row] == -math.inf:
                causes = self._masking(int(self._layout.request_index[row]))
                if causes and causes[0] in _PARAMETERS:
                    fields[row] = causes[0]
                errors[row] = f"no token can be sampled: {_why_masked(causes)}"
            else:
                errors[row] = f"logits hold {values[row]}, which no token can be sampled from"

    def _masking(self, index: int) -> list[str]:
        """What a request has that masks tokens."""
        features = self._layout.features_of_requests[index]
        causes = [name for flag, name in _MASKING.items() if features & flag]
        if any(index == constrained for constrained, _ in self._grammars):
            causes.append("the structured output")
        return causes

    def _cut_at_errors(self, sampled: SampledTokens) -> None:
        """Take back tokens that come from failed rows.

        A request fails if its first row did. A later row counts only once its drafts are committed:
        what a request gets must not depend on drafts.
        """
        errors, fields = self._faults.errors, self._faults.fields
        for row in sorted(errors):
            index = int(self._layout.request_index[row])
            num_good = row - self._layout.starts[index]
            if num_good == 0:
                sampled.errors[index] = errors[row]
                if row in fields:
                    sampled.error_fields[index] = fields[row]
            del sampled.token_ids[index][num_good:]

    def _advance_grammars(self, sampled: SampledTokens) -> None:
        for index, grammar in self._grammars:
            if index in sampled.errors:
                continue
            new, stop_ids = sampled.token_ids[index], self._layout.requests[index].stop_token_ids
            if not grammars.advance(grammar, new, stop_ids):
                sampled.errors[index] = f"the grammar refuses tokens {new!r} that its mask allows"
                sampled.token_ids[index] = []

    def _describe(self, sampled: SampledTokens, scores: Scores, found: Sequence[Tensor]) -> None:
        """The entries of the tokens that were kept."""
        indices = self._layout.requests_with(Feature.LOGPROBS)
        kept: list[int] = []
        start = 0
        for index in indices:
            kept.extend(range(start, start + len(sampled.token_ids[index])))
            start += len(self._layout.positions(index))
        entries = iter(scores.entries(found, kept))
        for index in indices:
            new = sampled.token_ids[index]
            if new:
                sampled.logprobs[index] = [next(entries) for _ in new]


def checked_token_ids(token_ids: Tensor, sampler_name: str, vocab_size: int) -> list[int]:
    """What a sampler drew, on the host, refused if it isn't within the vocabulary."""
    drawn: list[int] = token_ids.tolist()
    if drawn and (min(drawn) < 0 or max(drawn) >= vocab_size):
        raise PluginContractError(
            f"sampler {sampler_name!r} returned token ids from {min(drawn)} to {max(drawn)}; "
            f"allowed: 0 to {vocab_size - 1}"
        )
    return drawn


def _why_masked(causes: list[str]) -> str:
    if not causes:
        return "the model's logits are all -inf"
    return f"together, {', '.join(causes)} mask every one; loosen one of them"
