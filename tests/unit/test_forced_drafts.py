"""Tokens that grammars force, as drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotshoe.api import Grammar
from hotshoe.worker.batch import InputBatch
from hotshoe.worker.forced_drafts import ForcedDrafts


class Forcing(Grammar):
    """Forces what it's made with; nothing = it fails."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def forced_tokens(self, limit: int) -> list[int]:
        if not self.tokens:
            raise RuntimeError("it fails")
        return self.tokens[:limit]

    def accept(self, token_ids: Sequence[int]) -> bool:
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None: ...
    def fill_bitmask(self, bitmask: Tensor, row: int) -> None: ...

    @property
    def is_terminated(self) -> bool:
        return False


def drafts_of(grammars: dict[int, Grammar], rows: list[int], drafted: list[int]) -> list[int]:
    """How many drafts each row has: those of length 20 have room for two more tokens."""
    batch = InputBatch(
        max_num_seqs=8, max_model_len=23, block_size=16, num_groups=1, max_draft_tokens=4
    )
    batch.num_tokens[:] = 10
    batch.num_tokens[3] = 20
    forced = ForcedDrafts(batch, grammars, max_draft_tokens=4, max_model_len=23)
    forced.add(rows, [[1] if row != 4 else [] for row in rows], drafted)
    return drafted


def test_forced_tokens_take_the_place_of_other_drafts_as_far_as_there_is_room() -> None:
    grammars: dict[int, Grammar] = {row: Forcing(range(9)) for row in (1, 3, 4)}
    assert drafts_of(grammars, [0, 1, 3, 4], [1, 1, 1, 0]) == [1, 4, 2, 0]


def test_a_grammar_that_fails_to_say_what_it_forces_has_no_drafts_of_it() -> None:
    assert drafts_of({0: Forcing(()), 1: Forcing([7])}, [0, 1], [0, 0]) == [0, 1]


def test_many_requests_at_once_have_no_forced_tokens() -> None:
    grammars: dict[int, Grammar] = {row: Forcing([7]) for row in range(8)}
    assert drafts_of(grammars, list(range(8)), [0] * 8) == [0] * 8
