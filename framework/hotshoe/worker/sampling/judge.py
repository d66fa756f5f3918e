"""``Judge``: has an acceptance rule decide about the drafts of a step."""

# R=logits rows of a step, D=those that a rule is asked about, V=vocab_size

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotshoe.api.sampler import Candidates, SampleInput, Sampler
from hotshoe.worker.random import Purpose, uniforms
from hotshoe.worker.sampling.acceptance import (
    AcceptanceRule,
    Chances,
    DraftedPositions,
    Verdicts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout

_MAX_ELEMENTS = 1 << 19  # of a distribution at once: what stays in a CPU's cache
_MAX_ELEMENTS_ON_GPU = 1 << 24  # for the sake of its memory


@dataclass(frozen=True, slots=True, eq=False)
class DrawnDrafts:
    """Drafts that were drawn in one call.

    Attributes:
        token_ids: ``[n]`` int64, what was drawn.
        candidates: what each was drawn from, ``[n, C]``.
    """

    token_ids: Tensor
    candidates: Candidates


class DraftSources:
    """What drafts were drawn from, by batch row and position, until they are verified."""

    def __init__(self) -> None:
        self._by_row: dict[int, dict[int, tuple[DrawnDrafts, int]]] = {}

    def forget(self, rows: Sequence[int]) -> None:
        """What was drafted for these batch rows counts no more."""
        for row in rows:
            self._by_row.pop(row, None)

    def add(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], drawn: DrawnDrafts
    ) -> None:
        """Drafts were drawn. Of two for the same place the later counts.

        Args:
            rows: ``[n]``, of the batch.
            positions: ``[n]``, that they are for.
            drawn: those.
        """
        for index, (row, position) in enumerate(
            zip(rows.tolist(), positions.tolist(), strict=True)
        ):
            self._by_row.setdefault(row, {})[position] = drawn, index

    def take(self, row: int) -> Mapping[int, tuple[DrawnDrafts, int]]:
        """By position, with which others a draft was drawn, and its index among them; forgets
        them.
        """
        return self._by_row.pop(row, {})


@dataclass(frozen=True, slots=True)
class _Case:
    """A draft that a rule is asked about.

    Attributes:
        logits_row: at whose position it was made.
        source: with which others it was drawn, and its index among them; None if the rule doesn't
            read that.
    """

    logits_row: int
    token_id: int
    source: tuple[DrawnDrafts, int] | None


class Settled:
    """What a rule made of a step's drafts.

    Args:
        logits_rows: ``[D]`` int64 on the device.
        verdicts: about each.
    """

    def __init__(self, logits_rows: Tensor, verdicts: Verdicts) -> None:
        self._logits_rows = logits_rows
        self._verdicts = verdicts

    def tokens(self, drawn: Tensor) -> Tensor:
        """The token at each position.

        Args:
            drawn: ``[R]`` int64, what is drawn without drafts.
        """
        there = drawn.index_select(0, self._logits_rows)
        token_ids, are_given = self._verdicts.token_ids, self._verdicts.are_given
        return drawn.index_copy(0, self._logits_rows, torch.where(are_given, token_ids, there))


class Judge:
    """Finds the drafts that a rule is asked about, and the distributions behind them.

    Args:
        rule: that decides.
        sampler: tells the distributions of the target.
        vocab_size: V.

    Attributes:
        sources: filled by what draws drafts; None if the rule doesn't read them.
    """

    def __init__(self, rule: AcceptanceRule, sampler: Sampler, vocab_size: int) -> None:
        self._rule = rule
        self._sampler = sampler
        self._vocab_size = vocab_size
        self.sources = DraftSources() if rule.reads_drafter else None

    def settle(self, inputs: SampleInput, layout: Layout, step: SamplingStep) -> Settled | None:
        """Decide about the drafts of a step; None if there are none to decide about.

        Args:
            inputs: what its tokens are drawn from; not changed.
            layout: of the step.
            step: it.
        """
        cases = self._cases(layout, step)
        if not cases:
            return None
        is_gpu = inputs.logits.device.type != "cpu"
        most = _MAX_ELEMENTS_ON_GPU if is_gpu else _MAX_ELEMENTS
        size = max(most // self._vocab_size, 1)
        pieces = [cases[start : start + size] for start in range(0, len(cases), size)]
        rows, verdicts = zip(
            *(self._settle_some(piece, inputs, layout, step) for piece in pieces), strict=True
        )
        token_ids = torch.cat([one.token_ids for one in verdicts])
        are_given = torch.cat([one.are_given for one in verdicts])
        return Settled(torch.cat(rows), Verdicts(token_ids, are_given))

    def _cases(self, layout: Layout, step: SamplingStep) -> list[_Case]:
        """Drafts that were drawn together side by side."""
        cases: list[_Case] = []
        for index, drafts in enumerate(step.draft_token_ids):
            start, row = layout.starts[index], layout.rows[index]
            if not drafts or layout.is_greedy[start]:
                continue
            if self.sources is None:
                cases += [_Case(start + at, one, None) for at, one in enumerate(drafts)]
                continue
            sources, first = self.sources.take(row), int(step.num_tokens[row])
            for at, one in enumerate(drafts):
                if source := sources.get(first + at):
                    cases.append(_Case(start + at, one, source))
        cases.sort(key=lambda case: id(case.source[0]) if case.source else 0)
        return cases

    def _settle_some(
        self, cases: Sequence[_Case], inputs: SampleInput, layout: Layout, step: SamplingStep
    ) -> tuple[Tensor, Verdicts]:
        stage = layout.transfers.stage
        rows = np.array([case.logits_row for case in cases], dtype=np.int64)
        where = stage(rows)
        token_ids = stage(np.array([case.token_id for case in cases], dtype=np.int64))
        target = self._whole(self._sampler.candidates(_taken(inputs, rows, where)))
        if self.sources is None:
            drafted = DraftedPositions(token_ids=token_ids, target=target, chances=None)
            return where, self._rule.judge(drafted)
        drafter, drawn = self._drafter(cases, layout)
        coins, keys = (
            stage(_numbers(rows, layout, step, purpose))
            for purpose in (Purpose.ACCEPTANCE, Purpose.REPLACEMENT)
        )
        chances = Chances(drafter=drafter, coins=coins, keys=keys)
        verdicts = self._rule.judge(
            DraftedPositions(token_ids=token_ids, target=target, chances=chances)
        )
        # what was put in the place of a draft, as a grammar's tokens are, wasn't drawn
        are_given = verdicts.are_given & (drawn == token_ids)
        return where, Verdicts(verdicts.token_ids, are_given)

    def _drafter(self, cases: Sequence[_Case], layout: Layout) -> tuple[Tensor, Tensor]:
        """``[D, V]`` what drafts were drawn from, and ``[D]`` int64 what was drawn."""
        probs: list[Tensor] = []
        token_ids: list[Tensor] = []
        for drawn, places in _by_source(cases):
            where = layout.transfers.stage(np.array(places, dtype=np.int64))
            found = drawn.candidates
            some = Candidates(
                found.probs.index_select(0, where),
                None if found.token_ids is None else found.token_ids.index_select(0, where),
            )
            probs.append(self._whole(some))
            token_ids.append(drawn.token_ids.index_select(0, where))
        return torch.cat(probs), torch.cat(token_ids)

    def _whole(self, candidates: Candidates) -> Tensor:
        """``[D, V]`` float32 probabilities."""
        probs, token_ids = candidates.probs, candidates.token_ids
        if token_ids is None:
            return probs
        whole = probs.new_zeros((len(probs), self._vocab_size))
        return whole.scatter_add_(1, token_ids, probs)


def _by_source(cases: Sequence[_Case]) -> Iterator[tuple[DrawnDrafts, list[int]]]:
    """Calls that drew drafts, in order, and the indices of those drafts."""
    last: DrawnDrafts | None = None
    places: list[int] = []
    for case in cases:
        assert case.source is not None
        drawn, place = case.source
        if last is not None and drawn is not last:
            yield last, places
            places = []
        last = drawn
        places.append(place)
    if last is not None:
        yield last, places


def _taken(inputs: SampleInput, rows: NDArray[np.int64], where: Tensor) -> SampleInput:
    """Some rows, copied."""
    return replace(
        inputs,
        logits=inputs.logits.index_select(0, where),
        temperature=inputs.temperature.index_select(0, where),
        top_k=inputs.top_k.index_select(0, where),
        top_p=inputs.top_p.index_select(0, where),
        min_p=inputs.min_p.index_select(0, where),
        extra_args=[inputs.extra_args[row] for row in rows.tolist()],
    )


def _numbers(
    rows: NDArray[np.int64], layout: Layout, step: SamplingStep, purpose: Purpose
) -> NDArray[np.float64]:
    """``[D]``, for the positions of some logits rows."""
    table, batch_rows = layout.table, layout.batch_rows[rows]
    positions = step.num_tokens[batch_rows] + layout.num_drafts_before[rows]
    return uniforms(table.seeds[batch_rows], table.choice_indices[batch_rows], positions, purpose)
