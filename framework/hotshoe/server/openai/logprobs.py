"""Log probabilities as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotshoe.api import PositionLogprobs, TokenLogprob
from hotshoe.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""What stands for minus infinity, which JSON doesn't have."""

_REPLACEMENT = "\ufffd"


class LogprobsWriter:
    """Writes log probabilities, with the tokens' texts and bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.bytes_table
        self._bytes = table.all if table is not None else None
        self._shown = table.without_special if table is not None else None

    def completion(
        self, entries: Sequence[PositionLogprobs], num_top: int, offset: int
    ) -> dict[str, Any]:
        """Of output tokens, for completions.

        Args:
            num_top: how many of the likely tokens to name, besides the chosen one.
            offset: characters of the text before the first token.
        """
        found = _Columns(offset)
        for entry in entries:
            self._append(found, entry, num_top)
        return found.written()

    def echoed(
        self, prompt_token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None], num: int
    ) -> dict[str, Any]:
        """Of prompt tokens, for completions that repeat the prompt; the first has none."""
        found = _Columns(0)
        for token_id, entry in zip(prompt_token_ids, entries, strict=True):
            if entry is None:
                found.add(self.text(token_id), None, None, self.num_characters(token_id))
            else:
                self._append(found, entry, num)
        return found.written()

    def chat(self, entries: Sequence[PositionLogprobs], num_top: int) -> dict[str, Any]:
        """Of output tokens, for chat."""
        return {
            "content": [
                self._spelt(entry.token)
                | {"top_logprobs": [self._spelt(one) for one in entry.top[:num_top]]}
                for entry in entries
            ],
            "refusal": None,
        }

    def prompt(
        self, entries: Sequence[PositionLogprobs | None], num_top: int
    ) -> list[dict[str, Any] | None]:
        """Of prompt tokens: per position a mapping of token id to what is known of it."""
        return [None if entry is None else self._ranked(entry, num_top) for entry in entries]

    def text(self, token_id: int) -> str:
        """A token's text; ``bytes:\\xf0`` for one that is no text by itself."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text and self._bytes is not None and token_id < len(self._bytes):
            spelt = "".join(f"\\x{byte:02x}" for byte in self._bytes[token_id])
            return f"bytes:{spelt}"
        return text

    def num_characters(self, token_id: int) -> int:
        """How many characters begin with this token in a text; 0 for special tokens."""
        if self._shown is None:
            return len(self._tokenizer.decode([token_id], skip_special_tokens=True))
        if token_id >= len(self._shown):
            return 0
        # the other bytes of a character in UTF-8 look like 10xxxxxx
        return sum(byte & 0xC0 != 0x80 for byte in self._shown[token_id])

    def _append(self, found: _Columns, entry: PositionLogprobs, num_top: int) -> None:
        token = entry.token
        top = {self._named(one): clamped(one.logprob) for one in (*entry.top[:num_top], token)}
        found.add(
            self._named(token), clamped(token.logprob), top, self.num_characters(token.token_id)
        )

    def _named(self, token: TokenLogprob) -> str:
        if token.decoded is None or _REPLACEMENT in token.decoded:
            return self.text(token.token_id)
        return token.decoded

    def _spelt(self, token: TokenLogprob) -> dict[str, Any]:
        table = self._bytes
        known = table is not None and token.token_id < len(table)
        return {
            "token": token.decoded,
            "logprob": clamped(token.logprob),
            "bytes": list(table[token.token_id]) if table is not None and known else None,
        }

    def _ranked(self, entry: PositionLogprobs, num_top: int) -> dict[str, Any]:
        return {
            str(one.token_id): {
                "logprob": clamped(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded,
            }
            for one in (*entry.top[:num_top], entry.token)
        }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two stretches of a completion's log probabilities as one."""
    return {name: first[name] + second[name] for name in first}


def clamped(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if logprob > LOWEST else LOWEST


class _Columns:
    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self, token: str, logprob: float | None, top: dict[str, float] | None, length: int
    ) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._top.append(top)
        self._offsets.append(self._offset)
        self._offset += length

    def written(self) -> dict[str, Any]:
        return {
            "text_offset": self._offsets,
            "token_logprobs": self._logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top,
        }
