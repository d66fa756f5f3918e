"""Guided decoding inside a step: mask each position, walk the drafts, keep what was accepted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotshoe.api.guided_decoding import Grammar, GuidedDecodingBackend

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout


logger = logging.getLogger(__name__)


def constrained_requests(step: SamplingStep) -> list[int]:
    """Indices of the requests that have a grammar."""
    if not step.grammars:
        return []
    return [index for index, row in enumerate(step.rows) if row in step.grammars]


class GrammarMasks:
    """Turns the bitmasks of grammars into ``-inf`` logits.

    A byte of a mask looks up what happens to its eight tokens: much faster on a CPU than to unpack
    the bits and fill.
    """

    def __init__(self, device: torch.device) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        ceilings = np.where(bits == 1, np.inf, -np.inf).astype(np.float32)
        self._ceilings = torch.from_numpy(ceilings).to(device)

    def apply(
        self, logits: Tensor, layout: Layout, step: SamplingStep, errors: dict[int, str]
    ) -> None:
        """Mask every token that a grammar forbids, in place.

        A position behind a draft that the grammar refuses can't be reached; it stays as it is.

        Args:
            logits: ``[R, V]`` float32.
            layout: of the step.
            step: its grammars are as before when this returns.
            errors: gets the logits row of a request whose grammar fails, and why.
        """
        indices = constrained_requests(step)
        if not indices:
            return
        places: list[int] = []
        rows: list[int] = []
        for index in indices:
            places.append(len(rows))
            rows.extend(layout.positions(index))
        # what stays at -1, behind a draft that is refused, lets every token through
        bitmask = torch.full((len(rows), -(-logits.shape[1] // 32)), -1, dtype=torch.int32)
        batch_rows = [layout.rows[index] for index in indices]
        failed = _fill_first(step, batch_rows, bitmask, places)
        for place, why in failed.items():
            bitmask[place] = -1
            errors.setdefault(rows[place], why)
        for index, row, place in zip(indices, batch_rows, places, strict=True):
            drafts = step.draft_token_ids[index]
            if drafts and place not in failed:
                try:
                    _fill_drafts(step.grammars[row], drafts, bitmask, place + 1)
                except Exception as error:
                    errors.setdefault(rows[place], _failure(error))
        self._mask(logits, bitmask, rows)

    def _mask(self, logits: Tensor, bitmask: Tensor, rows: Sequence[int]) -> None:
        """Apply bitmasks in main memory, 32 tokens a word, lowest bit first, to some rows."""
        octets = bitmask.to(logits.device).view(torch.uint8).flatten().to(torch.int32)
        ceilings = self._ceilings.index_select(0, octets).view(len(rows), -1)
        ceilings = ceilings[:, : logits.shape[1]]
        if len(rows) == logits.shape[0]:
            torch.minimum(logits, ceilings, out=logits)
            return
        where = torch.tensor(rows, device=logits.device)
        logits[where] = torch.minimum(logits[where], ceilings)


def _fill_first(
    step: SamplingStep, batch_rows: Sequence[int], bitmask: Tensor, places: Sequence[int]
) -> dict[int, str]:
    """Fill the mask of each request's first position, those of one backend in one call.

    Returns:
        By place, why a grammar failed: it fails alone.
    """
    failed: dict[int, str] = {}
    together: dict[int, tuple[GuidedDecodingBackend, list[Grammar], list[int]]] = {}
    for row, place in zip(batch_rows, places, strict=True):
        grammar, backend = step.grammars[row], step.grammar_backends.get(row)
        if backend is None:
            _fill_alone(grammar, bitmask, place, failed)
        else:
            _, grammars, its_places = together.setdefault(id(backend), (backend, [], []))
            grammars.append(grammar)
            its_places.append(place)
    for backend, grammars, its_places in together.values():
        try:
            backend.fill_bitmasks(grammars, bitmask, its_places)
        except Exception:
            for grammar, place in zip(grammars, its_places, strict=True):
                _fill_alone(grammar, bitmask, place, failed)
    return failed


def _fill_alone(grammar: Grammar, bitmask: Tensor, place: int, failed: dict[int, str]) -> None:
    try:
        grammar.fill_bitmask(bitmask, place)
    except Exception as error:
        failed[place] = _failure(error)


def _failure(error: Exception) -> str:
    logger.warning("a grammar failed", exc_info=error)
    return f"structured_outputs: the guided-decoding backend failed: {error}"


def _fill_drafts(grammar: Grammar, drafts: Sequence[int], bitmask: Tensor, place: int) -> None:
    """Fill the mask of each position behind a draft, as far as they can be reached."""
    num_accepted = 0
    for number, draft in enumerate(drafts):
        # past the end of the grammar nothing but a stop token is allowed, however often it comes
        if not grammar.is_terminated:
            if not grammar.accept([draft]):
                break
            num_accepted += 1
        grammar.fill_bitmask(bitmask, place + number)
    if num_accepted:
        grammar.rollback(num_accepted)


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
