"""What the prompts of a load test are made of: random tokens, or words without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hotshoe.text.tokenizer import Tokenizer

Content = str | list[int]
"""A prompt as text or as token ids."""

_WORD_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this "
    "from or had by not but some what there we can out other were all your when up use word "
    "how said an each she which do their time if will way about many then them would write "
    "like so these her long make thing see him two has look more day could go come did my "
    "sound no most number who over know water than call first people may down side been now "
    "find any new work part take get place made live where after back little only round man "
    "year came show every good me give our under name very through just form much great "
    "think say help low line before turn cause same mean move right boy old too does tell "
    "sentence set three want air well also play small end put home read hand large spell "
    "add even land here must big high such follow act why ask men change went light kind "
    "off need house picture try us again animal point "
)
WORDS = tuple(_WORD_TEXT.split())
"""Common words; with a space before it, each is one token of most vocabularies."""


class PromptSource(Protocol):
    """Makes prompts of about so many tokens, from pieces that can be shared between prompts."""

    def piece(self, random: Random, count: int) -> Sequence[int | str]:
        """Part of a prompt, of ``count`` tokens."""
        ...

    def prompt(self, piece: Sequence[int | str]) -> Content:
        """The prompt that consists of a piece, or of several one after another."""
        ...


class WordSource:
    """Texts of common words: one word stands for one token, whatever the server's tokenizer.

    What the server counts is more: a template's tokens come on top, and a rare vocabulary splits
    words. Results report what it counted.
    """

    def piece(self, random: Random, count: int) -> list[str]:
        """``count`` words."""
        return random.choices(WORDS, k=count)

    def prompt(self, piece: Sequence[int | str]) -> str:
        """The words with spaces between them."""
        return " ".join(str(one) for one in piece)


class TokenSource:
    """Random ordinary tokens of a vocabulary.

    Args:
        tokenizer: of the model that the server runs.
        as_text: make texts of them, for endpoints that take no token ids. Encoded again, such a
            text may have a few tokens more or less.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_text: bool) -> None:
        self._tokenizer = tokenizer
        self._as_text = as_text
        special = tokenizer.special_token_ids
        self._ids = [one for one in range(tokenizer.vocab_size) if one not in special]

    def piece(self, random: Random, count: int) -> list[int]:
        """``count`` token ids."""
        return random.choices(self._ids, k=count)

    def prompt(self, piece: Sequence[int | str]) -> Content:
        """The ids, or their text."""
        ids = [int(one) for one in piece]
        return self._tokenizer.decode(ids, skip_special_tokens=False) if self._as_text else ids
