"""``TokenSampler``: from the logits of a step to the tokens that its requests get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotshoe.api.logits_processor import LogitsProcessor
from hotshoe.api.sampler import SampleInput, Sampler
from hotshoe.api.types import NewRequest, PositionLogprobs
from hotshoe.errors import PluginContractError, ShapeError
from hotshoe.worker.random import uniforms
from hotshoe.worker.sampling import grammars
from hotshoe.worker.sampling.draft_draws import WorkerDraftDraws
from hotshoe.worker.sampling.edits import HistoryMasks, StaticEdits
from hotshoe.worker.sampling.logprobs import describe
from hotshoe.worker.sampling.penalties import Penalties
from hotshoe.worker.sampling.processors import ProcessorChain
from hotshoe.worker.sampling.records import SampledTokens, SamplingStep
from hotshoe.worker.sampling.rows import Feature, Layout, RowTable
from hotshoe.worker.sampling.verify import verify

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_EDITING = ~int(Feature.LOGPROBS)  # features that change logits
_MASKING = {
    Feature.ALLOWED_TOKENS: "allowed_token_ids",
    Feature.BAD_WORDS: "bad_words",
    Feature.MIN_TOKENS: "min_tokens",
    Feature.LOGITS_PROCESSORS: "logits processors",
}
_PARAMETERS = ("allowed_token_ids", "bad_words", "min_tokens")


class TokenSampler:
    """Owns randomness, logit changes and verification; the sampler plugin only sees what is left.

    Keeps state per batch row. Greedy requests without extras cost one pass over the logits, in the
    type that the model gives them if the sampler takes it.

    Args:
        sampler: turns logits into candidates.
        max_num_seqs: number of batch rows.
        vocab_size: width of the logits.
        device: where the logits are.
        logits_processors: by name, each with whether it applies to every request; the order is that
            of application.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        logits_processors: Mapping[str, tuple[LogitsProcessor, bool]] | None = None,
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._device = device
        self._table = RowTable(max_num_seqs)
        self._penalties = Penalties()
        self._static = StaticEdits()
        self._masks = HistoryMasks()
        self._grammar_masks = grammars.GrammarMasks(device)
        self._processors = ProcessorChain(logits_processors or {})
        self._layout: Layout | None = None
        self._layout_version = -1

    def add_row(self, row: int, request: NewRequest) -> None:
        """Put a request on a batch row, when it is new and again when it resumes on another one.

        Its history isn't needed here: it is read from ``SamplingStep`` when the request samples.
        """
        has_processors = self._processors.applies_to(request.sampling_params)
        features = self._table.add(row, request, has_processors=has_processors)
        if features & Feature.PENALTIES:
            self._penalties.add(row)
        if features & (Feature.LOGIT_BIAS | Feature.ALLOWED_TOKENS):
            self._static.add(row, request)
        if features & (Feature.BAD_WORDS | Feature.MIN_TOKENS):
            self._masks.add(row, request)

    def remove_row(self, row: int) -> None:
        """Forget the request of a row, when it has ended or was preempted."""
        self._table.remove(row)
        self._penalties.remove(row)
        self._static.remove(row)
        self._masks.remove(row)

    def sample(self, step: SamplingStep) -> SampledTokens:
        """Draw and verify the tokens of one step.

        A request whose logits leave no token to choose, or whose logits processor raises, is
        reported in ``errors``; the others aren't touched by it.

        Raises:
            ShapeError: if the parts of the step don't fit together.
            PluginContractError: if the sampler returns something that isn't one token id per row.
        """
        if step.logits.shape[1] != self._vocab_size:
            raise ShapeError(f"logits are {step.logits.shape[1]} wide, not {self._vocab_size}")
        layout = self._laid_out(step)
        if not layout.rows:
            return SampledTokens(token_ids=[])
        logits = self._workable(step, layout)
        scored = layout.requests_with(Feature.LOGPROBS)
        raw = _logprobs_of(logits, layout, scored) if scored else None
        row_fields: dict[int, str] = {}
        row_errors = self._edit(logits, layout, step, row_fields)
        drawn = self._draw(logits, layout, step, row_errors, row_fields)
        sampled = SampledTokens(token_ids=verify(step.draft_token_ids, drawn))
        if row_errors:
            _cut_at_errors(sampled, layout, row_errors, row_fields)
        if step.grammars:
            self._advance_grammars(sampled, step)
        if raw is not None:
            sampled.logprobs.update(_describe(raw, layout, scored, sampled))
        return sampled

    def draft_draws(
        self, rows: Sequence[int], num_tokens: NDArray[np.int64]
    ) -> WorkerDraftDraws | None:
        """What draws drafts for the requests on some rows; None if all of them are greedy.

        Args:
            rows: batch rows.
            num_tokens: committed tokens by batch row.
        """
        if not self._table.temperature[rows].any():
            return None
        return WorkerDraftDraws(self._sampler, self._table, rows, num_tokens, self._vocab_size)

    def _laid_out(self, step: SamplingStep) -> Layout:
        """The layout of the step, the last one if nothing changed."""
        layout = self._layout
        if (
            layout is not None
            and self._layout_version == self._table.version
            and layout.starts[-1] == len(layout.rows) == step.logits.shape[0]
            and layout.rows == step.rows
            and not any(step.draft_token_ids)
        ):
            return layout
        self._layout = Layout.of(step, self._table, self._device)
        self._layout_version = self._table.version
        return self._layout

    def _workable(self, step: SamplingStep, layout: Layout) -> Tensor:
        """The logits as they are if the sampler takes them so and nothing changes them, otherwise
        in float32.
        """
        is_edited = layout.features & _EDITING or _constrained(layout, step, is_greedy=False)
        dtype = str(step.logits.dtype).removeprefix("torch.")
        if is_edited or dtype not in self._sampler.capabilities.logits_dtypes:
            return step.logits.float()
        return step.logits

    def _edit(
        self, logits: Tensor, layout: Layout, step: SamplingStep, fields: dict[int, str]
    ) -> dict[int, str]:
        """Apply everything that changes logits, in place; what failed by logits row. The parameters
        that are at fault are added to ``fields``.
        """
        errors: dict[int, str] = {}
        if layout.features & Feature.PENALTIES:
            self._penalties.apply(logits, layout, step)
        if layout.features & (Feature.LOGIT_BIAS | Feature.ALLOWED_TOKENS):
            self._static.apply(logits, layout)
        if layout.features & (Feature.BAD_WORDS | Feature.MIN_TOKENS):
            self._masks.apply(logits, layout, step)
        if layout.features & Feature.LOGITS_PROCESSORS:
            self._processors.apply(logits, layout, step, errors, fields)
        # what greedy requests get is known sooner than a mask
        constrained = _constrained(layout, step, is_greedy=False)
        if constrained:
            self._grammar_masks.apply(logits, layout, step, constrained, errors)
        return errors

    def _draw(
        self,
        logits: Tensor,
        layout: Layout,
        step: SamplingStep,
        errors: dict[int, str],
        fields: dict[int, str],
    ) -> list[int]:
        """One token per logits row; rows without a finite best token are added to ``errors``, and
        to ``fields`` if a sampling parameter is to blame.
        """
        greedy, best = self._most_likely(logits)
        constrained = _constrained(layout, step, is_greedy=True)
        if constrained:
            best = best.clone()
            refused = self._grammar_masks.refused(logits, layout, step, constrained, greedy, errors)
            for rows, masked in refused:
                allowed, their_best = self._most_likely(masked)
                best[torch.tensor(rows, device=best.device)] = their_best
                for row, token_id in zip(rows, allowed, strict=True):
                    greedy[row] = token_id
        self._check_best(best, layout, step, errors, fields)
        if layout.is_all_greedy:
            return greedy
        if errors:
            # something harmless, so that a failed row can't upset the sampler; it isn't used
            logits[torch.tensor(list(errors), device=logits.device)] = 0.0
        inputs = SampleInput(
            logits=logits,
            temperature=layout.temperature,
            top_k=layout.top_k,
            top_p=layout.top_p,
            min_p=layout.min_p,
            is_all_greedy=False,
            is_any_filtered=layout.is_any_filtered,
            extra_args=layout.extra_args,
        )
        numbers = self._uniforms(layout, step)
        drawn = self._checked(self._sampler.draw(inputs, numbers), len(layout.batch_rows))
        for row in layout.greedy_rows:  # greedy isn't for a draw to decide
            drawn[row] = greedy[row]
        return drawn

    def _uniforms(self, layout: Layout, step: SamplingStep) -> Tensor:
        """``[R]`` float64 on the device; 0 for greedy rows, which need none."""
        table, drawn = self._table, layout.drawn_rows
        rows = layout.batch_rows[drawn]
        values = np.zeros(len(layout.batch_rows))
        positions = step.num_tokens[rows] + layout.num_drafts_before[drawn]
        values[drawn] = uniforms(table.seeds[rows], table.choice_indices[rows], positions)
        return torch.from_numpy(values).to(self._device)

    def _most_likely(self, logits: Tensor) -> tuple[list[int], Tensor]:
        """Each row's best token, and its logit."""
        token_ids, best = self._sampler.most_likely(logits)
        num_rows = logits.shape[0]
        if best.dtype != torch.float32 or tuple(best.shape) != (num_rows,):
            raise PluginContractError(
                f"sampler {type(self._sampler).__name__!r} returned best logits of {best.dtype} "
                f"and shape {tuple(best.shape)}; allowed: float32 of shape ({num_rows},)"
            )
        return self._checked(token_ids, num_rows), best

    def _checked(self, tokens: Tensor, num_rows: int) -> list[int]:
        """The sampler's answer, refused if it isn't what the contract says."""
        name = type(self._sampler).__name__
        if tokens.dtype != torch.int64 or tuple(tokens.shape) != (num_rows,):
            raise PluginContractError(
                f"sampler {name!r} returned {tokens.dtype} of shape {tuple(tokens.shape)}; "
                f"allowed: int64 of shape ({num_rows},)"
            )
        drawn: list[int] = tokens.tolist()
        if min(drawn) < 0 or max(drawn) >= self._vocab_size:
            raise PluginContractError(
                f"sampler {name!r} returned token ids from {min(drawn)} to {max(drawn)}; "
                f"allowed: 0 to {self._vocab_size - 1}"
            )
        return drawn

    def _check_best(
        self,
        best: Tensor,
        layout: Layout,
        step: SamplingStep,
        errors: dict[int, str],
        fields: dict[int, str],
    ) -> None:
        """Find rows whose largest logit isn't a number that can be worked with."""
        values = best.cpu().numpy()
        is_finite = np.isfinite(values)
        if is_finite.all():
            return
        for row in np.flatnonzero(~is_finite).tolist():
            batch_row = int(layout.batch_rows[row])
            if row in errors:
                continue
            if values[row] == -np.inf:
                causes = self._masking(batch_row)
                if causes and causes[0] in _PARAMETERS:
                    fields[row] = causes[0]
                why = self._why_masked(batch_row, step, causes)
                errors[row] = f"no token can be sampled: {why}"
            else:
                errors[row] = f"logits hold {values[row]}, which no token can be sampled from"

    def _masking(self, row: int) -> list[str]:
        return [name for flag, name in _MASKING.items() if self._table.features[row] & flag]

    @staticmethod
    def _why_masked(row: int, step: SamplingStep, causes: list[str]) -> str:
        if row in step.grammars:
            causes.append("the structured output")
        if not causes:
            return "the model's logits are all -inf"
        return f"together, {', '.join(causes)} mask every one; loosen one of them"

    def _advance_grammars(self, sampled: SampledTokens, step: SamplingStep) -> None:
        for index in grammars.constrained_requests(step):
            row = step.rows[index]
            new, stop_ids = sampled.token_ids[index], self._table.request(row).stop_token_ids
            if index in sampled.errors:
                continue
            if not grammars.advance(step.grammars[row], new, stop_ids):
                sampled.errors[index] = f"the grammar refuses tokens {new!r} that its mask allows"
                sampled.token_ids[index] = []


def _constrained(layout: Layout, step: SamplingStep, *, is_greedy: bool) -> list[int]:
    """Indices of the constrained requests that are greedy, or of those that aren't."""
    return [
        index
        for index in grammars.constrained_requests(step)
        if bool(layout.is_greedy[layout.starts[index]]) is is_greedy
    ]


def _cut_at_errors(
    sampled: SampledTokens,
    layout: Layout,
    row_errors: dict[int, str],
    row_fields: dict[int, str],
) -> None:
    """Take back tokens that come from failed rows.

    A request fails if its first row did. A later row counts only once its drafts are committed:
    what a request gets must not depend on drafts.
    """
    for row in sorted(row_errors):
        index = int(layout.request_index[row])
        num_good = row - layout.starts[index]
        if num_good == 0:
            sampled.errors[index] = row_errors[row]
            if row in row_fields:
                sampled.error_fields[index] = row_fields[row]
        del sampled.token_ids[index][num_good:]


def _logprobs_of(logits: Tensor, layout: Layout, indices: list[int]) -> Tensor:
    """Of all positions of some requests, before anything changes the logits."""
    rows = [row for index in indices for row in layout.positions(index)]
    return _take(logits, rows).float().log_softmax(-1)


def _take(values: Tensor, rows: list[int]) -> Tensor:
    """Some rows; no copy if it is all of them."""
    if rows == list(range(len(values))):
        return values
    return values[torch.tensor(rows, device=values.device)]


def _describe(
    logprobs: Tensor, layout: Layout, indices: list[int], sampled: SampledTokens
) -> dict[int, list[PositionLogprobs]]:
    """The entries of the tokens that were kept."""
    kept: list[int] = []
    tokens: list[int] = []
    num_top: list[int] = []
    start = 0
    for index in indices:
        new = sampled.token_ids[index]
        num = layout.table.request(layout.rows[index]).sampling_params.logprobs
        assert num is not None
        kept.extend(range(start, start + len(new)))
        tokens.extend(new)
        num_top.extend([num] * len(new))
        start += len(layout.positions(index))
    if not kept:
        return {}
    found = iter(describe(_take(logprobs, kept), tokens, num_top))
    return {
        index: [next(found) for _ in sampled.token_ids[index]]
        for index in indices
        if sampled.token_ids[index]
    }
