"""Token-for-token comparison, with the excuses that float noise has, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from golden.oracle import MARGIN, Draw, Greedy

MAX_EXCUSED = 0.03
"""Share of outputs whose comparison may stop early."""


@dataclass
class Tally:
    """What a test has compared.

    Attributes:
        excuses: outputs whose comparison stopped early, as texts.
    """

    name: str
    num_outputs: int = 0
    num_tokens: int = 0
    excuses: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        excused = f"{len(self.excuses)} excused"
        text = f"{self.name}: {self.num_outputs} outputs, {self.num_tokens} tokens equal, {excused}"
        return f"{text} ({'; '.join(self.excuses)})" if self.excuses else text

    def add(self, what: str, expected: Sequence[int], actual: Sequence[int], excuse: str) -> None:
        """Compare one output.

        Args:
            excuse: why a difference at the first place where the two differ is no error; empty if
                it is one.
        """
        num_equal = num_common(expected, actual)
        self.num_outputs += 1
        self.num_tokens += num_equal
        if num_equal == len(expected) == len(actual):
            return
        assert excuse, (
            f"{what} differs from token {num_equal} on: expected {list(expected[num_equal:][:8])}, "
            f"got {list(actual[num_equal:][:8])}"
        )
        self.excuses.append(f"{what} at token {num_equal}: {excuse}")

    def check(self) -> None:
        """Fail if nothing was compared, or too much was excused."""
        assert self.num_tokens > 0
        assert len(self.excuses) <= max(1, MAX_EXCUSED * self.num_outputs), str(self)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def compare_greedy(tally: Tally, what: str, expected: Greedy, actual: Sequence[int]) -> None:
    """Compare an output with that of ``generate``."""
    place = num_common(expected.token_ids, actual)
    is_tied = place < len(expected.margins) and expected.margins[place] <= MARGIN
    excuse = f"top two logits are {expected.margins[place]:.1e} apart" if is_tied else ""
    tally.add(what, expected.token_ids, actual, excuse)


def compare_draws(tally: Tally, what: str, expected: Sequence[Draw], actual: Sequence[int]) -> None:
    """Compare an output with what its own prefixes should have led to."""
    token_ids = [one.token_id for one in expected]
    place = num_common(token_ids, actual)
    is_near_edge = place < len(expected) and expected[place].is_near_edge
    tally.add(what, token_ids, actual, "rounding decides" if is_near_edge else "")
