"""``IncrementalDetokenizer``: output text as it grows, in constant time per token.

Two ways. Where every token has its own bytes (byte-level and SentencePiece tokenizers), these run
through a UTF-8 decoder that keeps what is not yet a whole character. Any other tokenizer decodes a
short window of tokens before and after the new one and emits the difference.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from hotshoe.text.token_bytes import TokenBytes
from hotshoe.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_PENDING_BYTES = 3  # of a character of four
_WINDOW_SIZE = 6  # tokens of context: more than any decoder's rules look back


class IncrementalDetokenizer(ABC):
    """Turns output tokens into text piece by piece.

    The pieces joined are ``decode(prompt + output)`` without ``decode(prompt)`` at its front. A
    character that the prompt ends in the middle of belongs to the output.
    """

    @staticmethod
    def create(
        tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> IncrementalDetokenizer:
        """The detokenizer for one output.

        Args:
            prompt_token_ids: what the output follows; only its end is looked at.
            skip_special_tokens: whether special tokens stand for nothing.
        """
        table = tokenizer.bytes_table
        if table is None:
            return _WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        return _BytesDetokenizer(table, prompt_token_ids, skip_special_tokens)

    @abstractmethod
    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that they complete, never part of a character."""

    @abstractmethod
    def flush(self) -> str:
        """End the output; return what was held back, broken characters as U+FFFD."""


class _BytesDetokenizer(IncrementalDetokenizer):
    def __init__(
        self, table: TokenBytes, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._bytes = table.without_special if skip_special_tokens else table.all
        self._decoder = _UTF8("replace")
        prompt_end = self._last_bytes(prompt_token_ids)
        self._decoder.decode(prompt_end)
        self._prompt_is_broken = bool(self._decoder.getstate()[0])
        self._has_text_before = bool(prompt_end)
        self._strips_leading_space = table.strips_leading_space and not prompt_end

    def add(self, token_ids: Sequence[int]) -> str:
        table = self._bytes
        try:
            data = b"".join([table[token_id] for token_id in token_ids])
        except IndexError:  # ids that only the model's padded vocabulary has
            data = b"".join([table[i] for i in token_ids if i < len(table)])
        text = self._decoder.decode(data)
        if text and (self._prompt_is_broken or self._strips_leading_space):
            return self._first_text(text)
        return text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        if text and self._prompt_is_broken:
            return self._first_text(text)
        return text

    def _first_text(self, text: str) -> str:
        """Leave out what isn't the output's: the prompt's broken character, unless the output
        completed it; the space that a text must not start with.
        """
        unwanted = _REPLACEMENT if self._prompt_is_broken else " "
        if text[0] == unwanted:
            text = text[1:]
        self._prompt_is_broken = self._strips_leading_space = False
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's last bytes to know how it ends; empty if it has no text."""
        end = b""
        for token_id in reversed(token_ids):
            if token_id < len(self._bytes):
                end = self._bytes[token_id] + end
            if len(end) > _MAX_PENDING_BYTES:
                break
        return end


class _WindowDetokenizer(IncrementalDetokenizer):
    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        # left out here, not by decoding: a window of nothing but special tokens has no context
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        context = [i for i in reversed(prompt_token_ids) if i not in self._skipped]
        self._window = context[:_WINDOW_SIZE][::-1]
        self._num_emitted = len(self._window)

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join([self._add_one(i) for i in token_ids if i not in self._skipped])

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _add_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held_back = len(self._window) - self._num_emitted
        if text.endswith(_REPLACEMENT) and num_held_back <= _MAX_PENDING_BYTES:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        emitted = self._decode(self._window[: self._num_emitted])
        del self._window[:-_WINDOW_SIZE]
        self._num_emitted = len(self._window)
        return text[len(emitted) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
