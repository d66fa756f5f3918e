"""The bytes that each token stands for, so that text can be built, and grammars matched, without
decoding again from the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id. The text of a sequence is its tokens' bytes joined and read as UTF-8,
    broken parts as U+FFFD.

    Attributes:
        all: of every id; empty for ids that no token has.
        without_special: the same, with special tokens standing for nothing.
        strips_leading_space: whether decoding drops one space at the start of a text.
    """

    def __init__(
        self, all_bytes: list[bytes], special_ids: set[int], *, strips_leading_space: bool
    ) -> None:
        self.all = all_bytes
        self.without_special = list(all_bytes)
        for token_id in special_ids:
            self.without_special[token_id] = b""
        self.strips_leading_space = strips_leading_space

    @classmethod
    def from_tokenizer(cls, tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
        """The table of a byte-level or SentencePiece tokenizer; None for any other."""
        # the decoder's settings can only be read from its JSON form
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
        if (kind := _decoder_kind(decoder)) is None:
            return None
        to_bytes, strips_leading_space = kind
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = to_bytes(token)
        added = tokenizer.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        return cls(table, special_ids, strips_leading_space=strips_leading_space)


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool] | None:
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return _ByteLevel(), False
    if decoder["type"] != "Sequence":
        return None
    steps = decoder["decoders"]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevel(), False
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or not _replaces_space(steps[0]):
        return None
    if kinds[3:] == []:
        return _sentencepiece_bytes, False
    if kinds[3:] == ["Strip"]:
        strip = steps[3]
        if (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0):
            return _sentencepiece_bytes, True
    return None


def _replaces_space(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": _SPACE} and step["content"] == " ")


def _sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode("utf-8")


class _ByteLevel:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest for characters from
    U+0100 on (Radford et al. 2019).
    """

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        self._byte_of = {character: character for character in printable}
        rest = (byte for byte in range(256) if byte not in self._byte_of)
        self._byte_of.update((0x100 + index, byte) for index, byte in enumerate(rest))
        self._alphabet = frozenset(chr(character) for character in self._byte_of)

    def __call__(self, token: str) -> bytes:
        if self._alphabet.issuperset(token):
            return token.translate(self._byte_of).encode("latin-1")
        return token.encode("utf-8")  # an added token that isn't written in the alphabet
