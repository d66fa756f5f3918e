"""``OutputText``: the text of one output, from its tokens, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotshoe.api.sampling_params import SamplingParams
from hotshoe.text.detokenizer import IncrementalDetokenizer
from hotshoe.text.stop import StopChecker
from hotshoe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop: which one.
        num_tokens: how many of the tokens just appended belong to the output: those up to the one
            that completed it.
    """

    stop: str
    num_tokens: int


class OutputText:
    """Detokenizes one output and looks for its stop strings.

    These are looked for in the text of the tokens after the first ``min_tokens``.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._detokenizer = (
            IncrementalDetokenizer.create(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.detokenize
            else None
        )
        self._stop_checker = (
            StopChecker(params.stop, include_stop_str=params.include_stop_str_in_output)
            if params.stop and params.detokenize
            else None
        )
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._num_delivered = 0  # pieces

    @property
    def text(self) -> str:
        """All text so far that can't change any more."""
        return "".join(self._pieces)

    def delta(self) -> str:
        """The part of ``text`` that no earlier call returned."""
        pieces, start = self._pieces, self._num_delivered
        self._num_delivered = len(pieces)
        return pieces[start] if len(pieces) == start + 1 else "".join(pieces[start:])

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Take the next tokens. After a match no more may follow.

        An EOS or stop token that ended the output is not appended, unless its text shall appear.
        """
        if self._detokenizer is None:
            return None
        if self._stop_checker is None:
            self._pieces.append(self._detokenizer.add(token_ids))
            return None
        return self._append_checked(self._detokenizer, self._stop_checker, token_ids)

    def finish(self) -> str | None:
        """End the output: held-back text joins ``text``. Does nothing after a match.

        Returns:
            The stop string, if the last held-back character completed one.
        """
        if self._detokenizer is None:
            return None
        text = self._detokenizer.flush()
        if self._stop_checker is None:
            self._pieces.append(text)
            return None
        self._pieces.append(self._stop_checker.add(text))
        self._pieces.append(self._stop_checker.flush())
        return self._stop_checker.matched

    def _append_checked(
        self,
        detokenizer: IncrementalDetokenizer,
        stop_checker: StopChecker,
        token_ids: Sequence[int],
    ) -> StopMatch | None:
        # one by one: the token that completes a stop string is the last one of the output
        for index, token_id in enumerate(token_ids):
            text = detokenizer.add((token_id,))
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                self._pieces.append(text)
                continue
            self._pieces.append(stop_checker.add(text))
            if stop_checker.matched is not None:
                return StopMatch(stop_checker.matched, index + 1)
        return None
