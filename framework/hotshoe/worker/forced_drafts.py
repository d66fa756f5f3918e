"""``ForcedDrafts``: what a grammar leaves no choice about is offered as drafts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from hotshoe.api import Grammar
from hotshoe.worker.batch import InputBatch

logger = logging.getLogger(__name__)

MAX_FORCED_TOKENS = 16
"""Of a request and step, where nothing else drafts."""

_MAX_NUM_REQS = 4  # in a step: with more, a further token takes about as long as it saves


class ForcedDrafts:
    """Puts tokens that grammars force in the place of drafts, before which they come.

    They are verified like any other draft, so the output is what it is without them.

    Args:
        batch: whose ``drafts`` are filled.
        grammars: by batch row, as they are after a step.
        max_draft_tokens: most of a request and step.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        batch: InputBatch,
        grammars: Mapping[int, Grammar],
        *,
        max_draft_tokens: int,
        max_model_len: int,
    ) -> None:
        self._most = max_draft_tokens
        self._batch = batch
        self._grammars = grammars
        self._last = max_model_len - 1

    def add(
        self, rows: Sequence[int], new_token_ids: Sequence[Sequence[int]], num_drafts: list[int]
    ) -> None:
        """After a step.

        Args:
            rows: of the batch, of the requests of the step.
            new_token_ids: that each got.
            num_drafts: that each has for the next step; those whose grammars force tokens get
                these.
        """
        batch = self._batch
        if len(rows) > _MAX_NUM_REQS:
            return
        for index, row in enumerate(rows):
            grammar = self._grammars.get(row)
            if grammar is None or not new_token_ids[index]:
                continue
            room = min(self._most, self._last - int(batch.num_tokens[row]))
            tokens = _forced(grammar, room) if room > 0 else []
            if tokens:
                batch.drafts[row] = tokens
                num_drafts[index] = len(tokens)


def _forced(grammar: Grammar, limit: int) -> list[int]:
    try:
        return grammar.forced_tokens(limit)
    except Exception as error:
        # if it's broken, that shows where its mask is needed, and ends its request alone
        logger.warning("a grammar failed to say what it forces", exc_info=error)
        return []
