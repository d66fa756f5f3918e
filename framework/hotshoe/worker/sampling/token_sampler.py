"""``TokenSampler``: from the logits of a step to the tokens that its requests get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotshoe.api.logits_processor import LogitsProcessor
from hotshoe.api.sampler import SampleInput, Sampler
from hotshoe.api.types import NewRequest
from hotshoe.errors import PluginContractError, ShapeError
from hotshoe.worker.sampling import grammars
from hotshoe.worker.sampling.acceptance import AcceptanceRule
from hotshoe.worker.sampling.device_penalties import DevicePenalties
from hotshoe.worker.sampling.draft_draws import WorkerDraftDraws
from hotshoe.worker.sampling.edits import HistoryMasks, StaticEdits
from hotshoe.worker.sampling.judge import Judge
from hotshoe.worker.sampling.logprobs import Scores, score
from hotshoe.worker.sampling.penalties import Penalties
from hotshoe.worker.sampling.processors import ProcessorChain
from hotshoe.worker.sampling.records import SampledTokens, SamplingStep
from hotshoe.worker.sampling.rows import Feature, Layout, RowTable
from hotshoe.worker.sampling.started import Faults, StartedSampling, checked_token_ids
from hotshoe.worker.sampling.transfers import Transfers
from hotshoe.worker.streams import Streams, streams_for

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_EDITING = ~Feature.LOGPROBS  # features that change logits
_MAX_LAYOUTS = 64  # of one batch, by how many drafts its requests have


class TokenSampler:
    """Owns randomness, logit changes and verification; the sampler plugin only sees what is left.

    Keeps state per batch row. Greedy requests without extras cost one pass over the logits, in the
    type that the model gives them if the sampler takes it.

    A step has two halves. ``start`` asks the device for everything, and where that isn't the host,
    it waits for nothing. ``finish`` waits for the tokens, and does what only the host can do.

    Args:
        sampler: turns logits into candidates.
        max_num_seqs: number of batch rows.
        vocab_size: width of the logits.
        device: where the logits are.
        logits_processors: by name, each with whether it applies to every request; the order is that
            of application.
        streams: copies to and from the device; None = those of its kind.
        acceptance: rule that decides which drafts are kept; None = those that are drawn anyway.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        logits_processors: Mapping[str, tuple[LogitsProcessor, bool]] | None = None,
        streams: Streams | None = None,
        acceptance: AcceptanceRule | None = None,
    ) -> None:
        self._sampler = sampler
        self._judge = None if acceptance is None else Judge(acceptance, sampler, vocab_size)
        self._sampler_name = type(sampler).__name__
        self._taken_dtypes = {getattr(torch, name) for name in sampler.capabilities.logits_dtypes}
        self._vocab_size = vocab_size
        self._transfers = Transfers(streams or streams_for(device), device)
        self._table = RowTable(max_num_seqs)
        self._device_penalties: DevicePenalties | None = None
        if not self._transfers.is_immediate:
            self._device_penalties = DevicePenalties(vocab_size, device)
        self._penalties: Penalties | DevicePenalties = self._device_penalties or Penalties()
        self._static = StaticEdits()
        self._masks = HistoryMasks()
        self._grammar_masks = grammars.GrammarMasks(sampler, self._transfers)
        self._processors = ProcessorChain(logits_processors or {})
        self._layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], Layout] = {}
        self._layouts_version = -1

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
        if self._judge is not None and self._judge.sources is not None:
            self._judge.sources.forget([row])

    @property
    def verifies_refused_drafts(self) -> bool:
        """Whether the first draft that a grammar refuses is to be verified all the same: its rule
        has to see every draft.
        """
        return self._judge is not None and self._judge.sources is not None

    def needs_history(self, rows: Sequence[int]) -> bool:
        """Whether ``start`` reads the tokens of any of these batch rows.

        Then all of them have to be on the host by then, those of the step before too, which must
        have been finished. Drafts need them in any case.
        """
        return bool(self._table.needs_history[rows].any()) or self._penalties.needs_history(rows)

    def sample(self, step: SamplingStep) -> SampledTokens:
        """Draw and verify the tokens of one step: both halves, see ``start``."""
        return self.start(step).finish()

    def start(self, step: SamplingStep) -> StartedSampling:
        """Start to draw the tokens of one step.

        A request whose logits leave no token to choose, or whose logits processor raises, is
        reported in the errors of the outcome; the others aren't touched by it.

        Args:
            step: what it holds by batch row may change once this returns.

        Raises:
            ShapeError: if the parts of the step don't fit together.
            PluginContractError: if the sampler returns something that isn't one token id per row.
        """
        if step.logits.shape[1] != self._vocab_size:
            raise ShapeError(f"logits are {step.logits.shape[1]} wide, not {self._vocab_size}")
        layout = self._laid_out(step)
        logits = self._workable(step, layout)
        scored = layout.requests_with(Feature.LOGPROBS)
        raw = _logprobs_of(logits, layout, scored) if scored else None
        faults = Faults()
        self._edit(logits, layout, step, faults)
        token_ids, best = self._draw(logits, layout, step, faults)
        scores = None if raw is None else _score(raw, layout, scored, token_ids)
        arriving = (token_ids, best) if scores is None else (token_ids, best, *scores.tensors)
        arrive = self._transfers.copy_out(arriving)
        if not self._transfers.is_immediate:
            # the next step looks them up before they can be refused
            token_ids = token_ids.clamp(0, self._vocab_size - 1)
            if self._device_penalties is not None and layout.features & Feature.PENALTIES:
                self._device_penalties.count_drawn(token_ids, layout, step)
        return StartedSampling(
            token_ids,
            arrive,
            step,
            layout,
            faults,
            scores,
            sampler_name=self._sampler_name,
            vocab_size=self._vocab_size,
        )

    def draft_draws(
        self, rows: Sequence[int], num_tokens: NDArray[np.int64]
    ) -> WorkerDraftDraws | None:
        """What draws drafts for the requests on some rows; None if drafts are to be the most likely
        tokens, as if all of these requests are greedy.

        Args:
            rows: batch rows.
            num_tokens: committed tokens by batch row.
        """
        sources = None
        if self._judge is not None:
            sources = self._judge.sources
            if sources is None:
                return None
            sources.forget(rows)
        if not self._table.temperature[rows].any():
            return None
        return WorkerDraftDraws(
            self._sampler,
            self._table,
            self._transfers,
            rows,
            num_tokens,
            self._vocab_size,
            sources,
        )

    def _laid_out(self, step: SamplingStep) -> Layout:
        """The layout of the step; one that was there before, if the batch is the same and the
        numbers of drafts are.
        """
        if self._layouts_version != self._table.version or len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.clear()
            self._layouts_version = self._table.version
        key = tuple(step.rows), tuple(map(len, step.draft_token_ids))
        layout = self._layouts.get(key)
        if layout is None or layout.starts[-1] != step.logits.shape[0]:
            layout = self._layouts[key] = Layout.of(step, self._table, self._transfers)
        return layout

    def _workable(self, step: SamplingStep, layout: Layout) -> Tensor:
        """The logits as they are if the sampler takes them so and nothing but masks changes them,
        otherwise in float32.
        """
        is_edited = layout.features & _EDITING
        if is_edited or step.logits.dtype not in self._taken_dtypes:
            return step.logits.float()
        return step.logits

    def _edit(self, logits: Tensor, layout: Layout, step: SamplingStep, faults: Faults) -> None:
        """Apply everything that changes logits, in place."""
        if layout.features & Feature.PENALTIES:
            self._penalties.apply(logits, layout, step)
        if layout.features & (Feature.LOGIT_BIAS | Feature.ALLOWED_TOKENS):
            self._static.apply(logits, layout)
        if layout.features & (Feature.BAD_WORDS | Feature.MIN_TOKENS):
            self._masks.apply(logits, layout, step)
        if layout.features & Feature.LOGITS_PROCESSORS:
            self._processors.apply(logits, layout, step, faults.errors, faults.fields)
        constrained = self._masked_first(layout, step) if step.grammars else ()
        if constrained:
            self._grammar_masks.apply(logits, layout, step, constrained, faults.errors)

    def _masked_first(self, layout: Layout, step: SamplingStep) -> list[int]:
        """Indices of the constrained requests whose masks are applied before anything is drawn.

        On the host what a greedy request would get is known sooner than its mask.
        """
        constrained = grammars.constrained_requests(step)
        if not self._transfers.is_immediate:
            return constrained
        return [index for index in constrained if not layout.is_greedy[layout.starts[index]]]

    def _draw(
        self, logits: Tensor, layout: Layout, step: SamplingStep, faults: Faults
    ) -> tuple[Tensor, Tensor]:
        """``[R]`` token ids, and ``[R]`` float32 the best logit of each row."""
        if not layout.rows:
            device = logits.device
            return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
        greedy, best = self._most_likely(logits)
        if step.grammars and self._transfers.is_immediate:
            greedy, best = self._without_refused(logits, layout, step, greedy, best, faults)
        if layout.is_all_greedy:
            return greedy, best
        self._make_harmless(logits, best)
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
        # before a draw overwrites the logits
        settled = self._judge and self._judge.settle(inputs, layout, step)
        drawn = self._checked(self._sampler.draw(inputs, numbers), len(layout.batch_rows))
        if settled:
            drawn = settled.tokens(drawn)
        if layout.is_any_greedy:  # greedy isn't for a draw to decide
            drawn = torch.where(layout.is_greedy_on_device, greedy, drawn)
        return drawn, best

    def _without_refused(
        self,
        logits: Tensor,
        layout: Layout,
        step: SamplingStep,
        greedy: Tensor,
        best: Tensor,
        faults: Faults,
    ) -> tuple[Tensor, Tensor]:
        """What greedy requests get if their grammars refuse the most likely token."""
        constrained = [
            index
            for index in grammars.constrained_requests(step)
            if layout.is_greedy[layout.starts[index]]
        ]
        if not constrained:
            return greedy, best
        chosen = checked_token_ids(greedy, self._sampler_name, self._vocab_size)
        greedy, best = greedy.clone(), best.clone()
        for rows, masked in self._grammar_masks.refused(
            logits, layout, step, constrained, chosen, faults.errors
        ):
            where = torch.tensor(rows)
            greedy[where], best[where] = self._most_likely(masked)
        return greedy, best

    def _make_harmless(self, logits: Tensor, best: Tensor) -> None:
        """Nothing that fails can upset the sampler; what it draws there isn't used."""
        if not self._transfers.is_immediate:
            logits.masked_fill_(~best.isfinite()[:, None], 0.0)
            return
        is_finite = np.isfinite(best.numpy())
        if not is_finite.all():
            logits[torch.from_numpy(np.flatnonzero(~is_finite))] = 0.0

    def _uniforms(self, layout: Layout, step: SamplingStep) -> Tensor:
        """``[R]`` float64 on the device; 0 for greedy rows, which need none."""
        drawn = layout.drawn_rows
        values = np.zeros(len(layout.batch_rows))
        positions = step.num_tokens[layout.batch_rows[drawn]] + layout.num_drafts_before[drawn]
        values[drawn] = layout.uniforms.at(positions)
        return self._transfers.stage(values)

    def _most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best token, and its logit."""
        token_ids, best = self._sampler.most_likely(logits)
        num_rows = logits.shape[0]
        if best.dtype != torch.float32 or tuple(best.shape) != (num_rows,):
            raise PluginContractError(
                f"sampler {self._sampler_name!r} returned best logits of {best.dtype} "
                f"and shape {tuple(best.shape)}; allowed: float32 of shape ({num_rows},)"
            )
        return self._checked(token_ids, num_rows), best

    def _checked(self, tokens: Tensor, num_rows: int) -> Tensor:
        """The sampler's answer, refused if it hasn't the shape that the contract says."""
        if tokens.dtype != torch.int64 or tuple(tokens.shape) != (num_rows,):
            raise PluginContractError(
                f"sampler {self._sampler_name!r} returned {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}; allowed: int64 of shape ({num_rows},)"
            )
        return tokens


def _logprobs_of(logits: Tensor, layout: Layout, indices: list[int]) -> Tensor:
    """Of all positions of some requests, before anything changes the logits."""
    return _take(logits, layout, indices).float().log_softmax(-1)


def _score(raw: Tensor, layout: Layout, indices: list[int], token_ids: Tensor) -> Scores:
    """The tokens that are drawn at these positions; a draft that is kept is what is drawn there."""
    num_top: list[int] = []
    for index in indices:
        num = layout.requests[index].sampling_params.logprobs
        assert num is not None
        num_top.extend([num] * len(layout.positions(index)))
    return score(raw, _take(token_ids, layout, indices), num_top)


def _take(values: Tensor, layout: Layout, indices: list[int]) -> Tensor:
    """Rows of some requests; no copy if it is all of them."""
    if len(indices) == len(layout.rows):
        return values
    rows = np.concatenate([layout.positions(index) for index in indices])
    return values[layout.transfers.stage(rows)]
