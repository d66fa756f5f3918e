"""Guided decoding inside a step: mask each position, walk the drafts, keep what was accepted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from hotshoe.api.guided_decoding import Grammar, GuidedDecodingBackend

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.api.sampler import Sampler
    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout
    from hotshoe.worker.sampling.transfers import Transfers


logger = logging.getLogger(__name__)

_NUM_ROWS_AT_ONCE = 16


def constrained_requests(step: SamplingStep) -> list[int]:
    """Indices of the requests that have a grammar."""
    if not step.grammars:
        return []
    return [index for index, row in enumerate(step.rows) if row in step.grammars]


class GrammarMasks:
    """Applies the bitmasks of grammars to logits, where they are needed.

    To ask a grammar whether it takes one token costs a small part of a mask. So a request that is
    greedy, which means most of its tokens are known before, needs masks only where the most likely
    token is refused.

    Args:
        sampler: forbids tokens.
        transfers: to the device that holds the logits.
    """

    def __init__(self, sampler: Sampler, transfers: Transfers) -> None:
        self._sampler = sampler
        self._transfers = transfers
        # kept, since so much new memory costs more than what is done with it
        self._room = torch.empty(0, 0)

    def apply(
        self,
        logits: Tensor,
        layout: Layout,
        step: SamplingStep,
        indices: Sequence[int],
        errors: dict[int, str],
    ) -> None:
        """Mask every token that a grammar forbids, in place, at all positions of some requests.

        A position behind a draft that the grammar refuses can't be reached; it stays as it is.

        Args:
            logits: ``[R, V]``, of a type that the sampler takes.
            layout: of the step.
            step: its grammars are as before when this returns.
            indices: of the requests.
            errors: gets the logits row of a request whose grammar fails, and why.
        """
        rows, bitmask = _bitmasks(layout, step, indices, None, logits.shape[1], errors)
        if not self._transfers.is_immediate:
            bitmask = self._transfers.stage(bitmask.numpy())
        start = 0
        for end in range(1, len(rows) + 1):
            # rows that lie side by side at once
            if end == len(rows) or rows[end] != rows[end - 1] + 1:
                self._sampler.mask(logits[rows[start] : rows[end - 1] + 1], bitmask[start:end])
                start = end

    def refused(
        self,
        logits: Tensor,
        layout: Layout,
        step: SamplingStep,
        indices: Sequence[int],
        chosen: Sequence[int],
        errors: dict[int, str],
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Where the grammars of some requests refuse the token that was chosen without them.

        Args:
            logits: ``[R, V]`` on the host, of a type that the sampler takes; not changed.
            layout: of the step.
            step: its grammars are as before when the first rows come.
            indices: of the requests.
            chosen: ``[R]`` token ids.
            errors: gets the logits row of a request whose grammar fails, and why.

        Yields:
            Some logits rows, and their logits without the tokens that the grammar forbids, which
            the next overwrite.
        """
        rows, bitmask = _bitmasks(layout, step, indices, list(chosen), logits.shape[1], errors)
        for start in range(0, len(rows), _NUM_ROWS_AT_ONCE):
            some = rows[start : start + _NUM_ROWS_AT_ONCE]
            masked = self._copied(logits, some)
            self._sampler.mask(masked, bitmask[start : start + len(some)])
            yield some, masked

    def _copied(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Some rows, in memory that is used again."""
        if len(self._room) < len(rows) or self._room.dtype != logits.dtype:
            self._room = logits.new_empty(len(rows), logits.shape[1])
        copies = self._room[: len(rows)]
        for copy, row in zip(copies, rows, strict=True):
            copy.copy_(logits[row])
        return copies


def _bitmasks(
    layout: Layout,
    step: SamplingStep,
    indices: Sequence[int],
    chosen: Sequence[int] | None,
    vocab_size: int,
    errors: dict[int, str],
) -> tuple[list[int], Tensor]:
    """Logits rows of some requests, in order, and a mask for each.

    Args:
        layout: of the step.
        step: its grammars are as before when this returns.
        indices: of the requests.
        chosen: ``[R]`` tokens; where a grammar takes them there is no need for a mask. None = masks
            everywhere.
        vocab_size: width of the logits.
        errors: gets the logits row of a request whose grammar fails, and why.
    """
    first: list[tuple[int, int]] = []
    later: list[tuple[int, Tensor]] = []
    shape = (1, -(-vocab_size // 32))
    for index in indices:
        grammar, start = step.grammars[layout.rows[index]], layout.starts[index]
        drafts = step.draft_token_ids[index]
        try:
            wanted = None if chosen is None else chosen[start : start + len(drafts) + 1]
            if wanted is None or not grammar.validate(wanted[:1]):
                first.append((start, layout.rows[index]))
            elif not drafts or wanted[0] != drafts[0]:
                continue
            for number in _walk(grammar, drafts, wanted) if drafts else ():
                mask = torch.empty(shape, dtype=torch.int32)
                grammar.fill_bitmask(mask, 0)
                later.append((start + number, mask))
        except Exception as error:
            errors.setdefault(start, _failure(error))
    bitmask = torch.empty((len(first), shape[1]), dtype=torch.int32)
    _fill_together(step, first, bitmask, errors)
    if not later:
        return [row for row, _ in first], bitmask
    rows = [*(row for row, _ in first), *(row for row, _ in later)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    bitmask = torch.cat([bitmask, *(mask for _, mask in later)])
    return [rows[at] for at in order], bitmask[torch.tensor(order)]


def _walk(grammar: Grammar, drafts: Sequence[int], chosen: Sequence[int] | None) -> Iterator[int]:
    """Move a grammar over drafts and stop where a mask is needed, as far as the drafts can be
    reached; then it's as before. Yields how many drafts are behind.
    """
    num_accepted = 0
    try:
        for number, draft in enumerate(drafts, start=1):
            # past the end of the grammar nothing but a stop token is allowed, however often it
            # comes
            if not grammar.is_terminated:
                if not grammar.accept([draft]):
                    return
                num_accepted += 1
            if chosen is None or not grammar.validate(chosen[number : number + 1]):
                yield number
            elif number == len(drafts) or chosen[number] != drafts[number]:
                return
    finally:
        if num_accepted:
            grammar.rollback(num_accepted)


def _fill_together(
    step: SamplingStep,
    places: Sequence[tuple[int, int]],
    bitmask: Tensor,
    errors: dict[int, str],
) -> None:
    """Fill masks of requests' first positions, those of one backend in one call. A grammar that
    fails does so alone, and lets every token through.

    Args:
        step: has the grammars.
        places: logits row and batch row of each row of the bitmask.
        bitmask: is filled.
        errors: gets the logits row of a request whose grammar fails, and why.
    """
    together: dict[int, tuple[GuidedDecodingBackend, list[Grammar], list[int]]] = {}
    alone: list[int] = []
    for place, (_, batch_row) in enumerate(places):
        backend = step.grammar_backends.get(batch_row)
        if backend is None:
            alone.append(place)
        else:
            _, grammars, its_places = together.setdefault(id(backend), (backend, [], []))
            grammars.append(step.grammars[batch_row])
            its_places.append(place)
    for backend, grammars, its_places in together.values():
        try:
            backend.fill_bitmasks(grammars, bitmask, its_places)
        except Exception:
            alone += its_places
    for place in alone:
        row, batch_row = places[place]
        try:
            step.grammars[batch_row].fill_bitmask(bitmask, place)
        except Exception as error:
            bitmask[place] = -1
            errors.setdefault(row, _failure(error))


def _failure(error: Exception) -> str:
    logger.warning("a grammar failed", exc_info=error)
    return f"structured_outputs: the guided-decoding backend failed: {error}"


def advance(grammar: Grammar, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> bool:
    """Move a grammar over the tokens that were accepted.

    Args:
        grammar: of one request, as before the step.
        token_ids: its new tokens.
        stop_token_ids: tokens that end the output; nothing behind one matters.

    Returns:
        False if the grammar refuses a token that its own mask allowed.
    """
    for token_id in token_ids:
        if grammar.is_terminated:
            return True
        if not grammar.accept([token_id]):
            return token_id in stop_token_ids
    return True
