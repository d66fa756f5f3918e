"""The sampler: a definition that sorts the whole vocabulary, and a draw that rarely has to."""

from __future__ import annotations

import torch
from torch import Tensor

from hotshoe.api import Candidates, SampleInput, Sampler, gumbel_max
from hotshoe_samplers.standard.filters import Filters, is_kept, weights_of
from hotshoe_samplers.standard.nucleus import chunks, filtered_by_histogram

# R=rows, V=vocab_size, C=candidates per row

_NUM_CANDIDATES = 128  # of the most probable tokens, which settle all but wide distributions
_MAX_SORTED_ELEMENTS = 1 << 24  # at once on a GPU, for the sake of its memory


class StandardSampler(Sampler):
    """Temperature, then top_k, top_p and min_p, each on what the one before left.

    top_k keeps the k most probable tokens; top_p the smallest set of the most probable ones whose
    share of what is left reaches it (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751);
    min_p those with at least its share of the most probable one's probability (Nguyen et al. 2024,
    arXiv:2407.01082). Of equally probable tokens at a boundary the ones with lower ids stay.
    """

    def candidates(self, inputs: SampleInput) -> Candidates:
        """The definition: distributions over the whole vocabulary, filtered by sorting it."""
        logits, filters = inputs.logits, Filters.of(inputs)
        best, best_ids = logits.max(-1, keepdim=True)
        weights = weights_of(logits, filters.temperature, best)
        if inputs.is_any_filtered:
            weights = _filtered_by_sorting(logits, weights, filters)
        one_hot = torch.zeros_like(weights).scatter_(1, best_ids, 1.0)
        weights = torch.where((inputs.temperature == 0)[:, None], one_hot, weights)
        totals = weights.sum(-1, keepdim=True, dtype=torch.float64)
        return Candidates((weights / totals).to(torch.float32))

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        """The same tokens, each row treated by the cheapest means that is exact for it."""
        if inputs.is_all_greedy:
            return inputs.logits.argmax(-1)
        if inputs.logits.device.type != "cpu":
            return _draw_without_a_look(inputs, uniforms)
        filters = Filters.of(inputs)
        is_greedy = inputs.temperature == 0
        is_filtered = filters.are_set(inputs.logits.shape[1]) & ~is_greedy
        tokens = torch.empty_like(inputs.top_k)
        for is_chosen, draw in (
            (is_greedy, _draw_greedy),
            (is_filtered, _draw_filtered),
            (~(is_greedy | is_filtered), _draw_plain),
        ):
            where = is_chosen.nonzero()[:, 0]
            if len(where) > 0:
                logits = _take(inputs.logits, where)
                tokens[where] = draw(logits, filters.rows(where), uniforms[where])
        return tokens


def quick_candidates(inputs: SampleInput) -> Candidates:
    """The definition, each row by the cheapest means that is exact for it; for logits on a CPU.

    Args:
        inputs: of float32 logits, which are overwritten.
    """
    logits, filters = inputs.logits, Filters.of(inputs)
    is_greedy = inputs.temperature == 0
    is_filtered = filters.are_set(logits.shape[1]) & ~is_greedy
    where = is_filtered.nonzero()[:, 0]
    filtered = _filtered_weights(_take(logits, where), filters.rows(where)) if len(where) else None
    if filtered is not None and len(where) == len(logits):
        weights = filtered
    else:
        greedy = is_greedy.nonzero()[:, 0]
        one_hot = torch.zeros(len(greedy), logits.shape[1])
        one_hot.scatter_(1, logits[greedy].argmax(-1, keepdim=True), 1.0)
        best = logits.amax(-1, keepdim=True)
        weights = logits.sub_(best).div_(filters.temperature[:, None]).exp_()
        weights[greedy] = one_hot
        if filtered is not None:
            weights[where] = filtered
    totals = weights.sum(-1, keepdim=True, dtype=torch.float64)
    return Candidates(weights.div_(totals.to(torch.float32)))


def _filtered_weights(logits: Tensor, filters: Filters) -> Tensor:
    """``[R, V]`` weights with 0 for every token that the filters drop."""
    vocab_size = logits.shape[1]
    if vocab_size <= _NUM_CANDIDATES:
        weights = weights_of(logits, filters.temperature, logits.amax(-1, keepdim=True))
        return _filtered_by_sorting(logits, weights, filters)
    found, is_exact = _most_probable(logits, filters, _totals(logits, filters), _NUM_CANDIDATES)
    assert found.token_ids is not None
    weights = torch.zeros_like(logits).scatter_(1, found.token_ids, found.probs)
    has_top_k = filters.top_k < vocab_size
    rows = (~is_exact & has_top_k).nonzero()[:, 0]
    if len(rows) > 0:
        chosen, its = logits[rows], filters.rows(rows)
        whole = weights_of(chosen, its.temperature, chosen.amax(-1, keepdim=True))
        weights[rows] = _filtered_by_sorting(chosen, whole, its)
    rows = (~is_exact & ~has_top_k).nonzero()[:, 0]
    if len(rows) > 0:
        chosen, its = logits[rows], filters.rows(rows)
        for some in chunks(chosen):
            weights[rows[some]] = filtered_by_histogram(chosen[some], its.rows(some))
    return weights


def _draw_without_a_look(inputs: SampleInput, uniforms: Tensor) -> Tensor:
    """For a GPU, which shouldn't be waited for: the same for all rows, whatever they hold."""
    logits, filters = inputs.logits, Filters.of(inputs)
    greedy = logits.argmax(-1)
    if inputs.is_any_filtered:
        size = max(_MAX_SORTED_ELEMENTS // logits.shape[1], 1)
        pieces = [slice(start, start + size) for start in range(0, len(logits), size)]
        drawn = torch.cat(
            [_draw_by_sorting(logits[rows], filters.rows(rows), uniforms[rows]) for rows in pieces]
        )
    else:
        drawn = _draw_plain(logits, filters, uniforms)
    return torch.where(inputs.temperature == 0, greedy, drawn)


def _draw_greedy(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    return logits.argmax(-1)


def _draw_plain(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    best = logits.amax(-1, keepdim=True)
    # in place: the logits are the sampler's to overwrite, and a copy costs more than the arithmetic
    weights = logits.sub_(best).div_(filters.temperature[:, None]).exp_()
    return gumbel_max(Candidates(weights), uniforms)


def _draw_filtered(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    """Look among a few of the most probable tokens; take the long way where that isn't exact."""
    if logits.shape[1] <= _NUM_CANDIDATES:
        return _draw_by_sorting(logits, filters, uniforms)
    found, is_exact = _most_probable(logits, filters, _totals(logits, filters), _NUM_CANDIDATES)
    tokens = gumbel_max(found, uniforms)
    has_top_k = filters.top_k < logits.shape[1]
    for rows, draw in (
        ((~is_exact & has_top_k).nonzero()[:, 0], _draw_wide_top_k),
        ((~is_exact & ~has_top_k).nonzero()[:, 0], _draw_wide_nucleus),
    ):
        if len(rows) > 0:
            tokens[rows] = draw(_take(logits, rows), filters.rows(rows), uniforms[rows])
    return tokens


def _draw_wide_top_k(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    """One candidate more than the largest top_k settles every row but those with a tie there."""
    width = min(int(filters.top_k.max()) + 1, logits.shape[1])
    totals = torch.zeros_like(filters.top_p)  # top_k ends within the width, so none is read
    found, is_exact = _most_probable(logits, filters, totals, width)
    tokens = gumbel_max(found, uniforms)
    rows = (~is_exact).nonzero()[:, 0]
    if len(rows) > 0:
        tokens[rows] = _draw_by_sorting(logits[rows], filters.rows(rows), uniforms[rows])
    return tokens


def _draw_by_sorting(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    weights = weights_of(logits, filters.temperature, logits.amax(-1, keepdim=True))
    return gumbel_max(Candidates(_filtered_by_sorting(logits, weights, filters)), uniforms)


def _draw_wide_nucleus(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    tokens = torch.empty_like(filters.top_k)
    for rows in chunks(logits):
        kept = filtered_by_histogram(logits[rows], filters.rows(rows))
        tokens[rows] = gumbel_max(Candidates(kept), uniforms[rows])
    return tokens


def _totals(logits: Tensor, filters: Filters) -> Tensor:
    """``[R]`` float64 sum of each row's weights; left at 0 where no filter reads it."""
    totals = torch.zeros_like(filters.top_p)
    where = ((filters.top_p < 1) & (filters.top_k > _NUM_CANDIDATES)).nonzero()[:, 0]
    if len(where) > 0:
        chosen, temperature = _take(logits, where), filters.temperature[where]
        for rows in chunks(chosen):
            best = chosen[rows].amax(-1, keepdim=True)
            weights = weights_of(chosen[rows], temperature[rows], best)
            totals[where[rows]] = weights.sum(-1, dtype=torch.float64)
    return totals


def _most_probable(
    logits: Tensor, filters: Filters, totals: Tensor, width: int
) -> tuple[Candidates, Tensor]:
    """Filter among the ``width`` largest logits.

    Returns:
        The candidates, ids ascending, and ``[R]`` bool: whether the filters' boundary lies among
        them, so that nothing outside matters, not even a token as probable as the last one kept.
    """
    vocab_size = logits.shape[1]
    ids = logits.topk(width, sorted=False).indices.sort(-1).values
    ordered, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    weights = weights_of(ordered, filters.temperature, ordered[:, :1])
    kept = is_kept(weights, filters, totals)
    last_kept = ordered.gather(1, kept.sum(-1, keepdim=True) - 1)[:, 0]
    # top_p refers to what top_k leaves, which isn't known if top_k ends further down
    is_total_known = (filters.top_p == 1) | (filters.top_k <= width) | (filters.top_k == vocab_size)
    is_exact = is_total_known & (last_kept > ordered[:, -1])
    by_id = torch.zeros_like(weights).scatter_(1, order, weights * kept)
    return Candidates(by_id, ids), is_exact


def _filtered_by_sorting(logits: Tensor, weights: Tensor, filters: Filters) -> Tensor:
    """``[R, V]`` weights with 0 for every token that the filters drop."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    totals = weights.sum(-1, dtype=torch.float64)
    kept = is_kept(ordered, filters, totals)
    return torch.zeros_like(weights).scatter_(1, order, ordered * kept)


def _take(logits: Tensor, where: Tensor) -> Tensor:
    """Some rows; no copy if it is all of them (``where`` is ascending and free of repeats)."""
    return logits if len(where) == len(logits) else logits[where]
