"""Texts that a grammar forces, as tokens."""

from __future__ import annotations

from functools import lru_cache

from hotshoe.api import GuidedDecodingContext

_MAX_KEPT = 4096


class TextCutter:
    """Cuts texts into tokens as the model would write them.

    Args:
        context: has the tokenizer, and the bytes of each token.
    """

    def __init__(self, context: GuidedDecodingContext) -> None:
        self._texts = context.token_bytes
        self._tokenizer = None
        if context.tokenizer_json is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(context.tokenizer_json)
        self._id_of = {text: token_id for token_id, text in enumerate(context.token_bytes) if text}
        self._longest = max(map(len, self._id_of), default=1)
        # the same names come again and again
        self._kept = lru_cache(_MAX_KEPT)(self._cut)

    def __call__(self, text: bytes) -> tuple[int, ...]:
        """The tokens of a text; fewer than it has if the vocabulary lacks some of its bytes."""
        return self._kept(text)

    def _cut(self, text: bytes) -> tuple[int, ...]:
        if self._tokenizer is not None:
            try:
                ids = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
            except UnicodeDecodeError:
                ids = []
            if b"".join(self._texts[token_id] for token_id in ids) == text:
                return tuple(ids)
        return tuple(self._greedy(text))

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token each time, for what the tokenizer would write differently."""
        ids, position = [], 0
        while position < len(text):
            for length in range(min(self._longest, len(text) - position), 0, -1):
                token_id = self._id_of.get(text[position : position + length])
                if token_id is not None:
                    ids.append(token_id)
                    position += length
                    break
            else:
                break
        return ids
