"""Guided-decoding contract: compile a constraint off the loop, then say at each position which
tokens it allows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hotshoe.api.sampling_params import StructuredOutputs
from hotshoe.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint in the client's words.

    Attributes:
        kind: ``json``, ``json_object``, ``regex``, ``choice``, ``grammar`` or ``structural_tag``.
        value: schema, pattern or grammar as text; a JSON list for ``choice``; empty for
            ``json_object``.
    """

    kind: str
    value: str = ""

    @classmethod
    def of(cls, constraint: StructuredOutputs) -> GrammarSpec:
        """The one constraint that is set in a request."""
        if constraint.choice is not None:
            return cls(kind="choice", value=msgspec.json.encode(constraint.choice).decode())
        for kind in ("json", "regex", "grammar", "structural_tag"):
            value = getattr(constraint, kind)
            if value is not None:
                return cls(kind=kind, value=value)
        return cls(kind="json_object")

    def tag_format(self) -> dict[str, Any] | None:
        """The constraint as a part of a structural tag, in xgrammar's words; None for one that has
        no such form.

        Raises:
            RequestError: if the value isn't valid JSON but has to be.
        """
        if self.kind == "json":
            return {"type": "json_schema", "json_schema": self._loaded()}
        if self.kind == "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        if self.kind == "regex":
            return {"type": "regex", "pattern": self.value}
        if self.kind == "choice":
            texts = [{"type": "const_string", "value": text} for text in self._loaded()]
            return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
        if self.kind == "structural_tag":
            tag = self._loaded()
            found = tag.get("format") if isinstance(tag, dict) else None
            return found if isinstance(found, dict) else None
        return None

    def _loaded(self) -> Any:
        try:
            return json.loads(self.value)
        except (ValueError, RecursionError) as error:
            field = f"structured_outputs.{self.kind}"
            raise RequestError(f"{field}: is not valid JSON: {error}", field=field) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingContext:
    """Facts a backend may be built on.

    Attributes:
        vocab_size: width of the logits.
        token_bytes: what each token id appends to the text; empty for special tokens and ids
            that no token has.
        eos_token_ids: tokens that end the output, allowed once the constraint is satisfied.
        tokenizer_json: the tokenizer in the ``tokenizers`` library's format, if it has one.
    """

    vocab_size: int
    token_bytes: Sequence[bytes]
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str | None = None


class Grammar(ABC):
    """A matcher: the state of one request's constraint. Not shared between requests."""

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens; False if one is not allowed, and then the state is as before the
        call.
        """

    @abstractmethod
    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first, are allowed now. Doesn't change the state.

        Asked for the most likely token of each position of a greedy request; only where that is
        refused a mask is filled. So it has to be quick.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Set bit ``i`` of ``bitmask[row]`` (int32 words, ``[rows, ceil(vocab_size / 32)]``) iff
        token i is allowed next.
        """

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the output is complete and only a stop token may follow."""

    def forced_tokens(self, limit: int) -> list[int]:
        """Tokens that have to come next, since the grammar leaves no choice, as the model would
        write them; none, if that isn't known. Doesn't change the state.

        They are verified like drafts: a token that isn't what the model writes costs time and
        changes nothing. Asked for after each step, so it has to be quick.

        Args:
            limit: the most that can be used.
        """
        return []


class CompiledGrammar(ABC):
    """A constraint made ready for a tokenizer. Shared: the core keeps it and asks it for a matcher
    for each request with this constraint.
    """

    @abstractmethod
    def matcher(self) -> Grammar:
        """A fresh matcher at its start. Quick; thread-safe."""


class GuidedDecodingBackend(ABC):
    """Compiles constraints. Built per worker as ``factory(options, GuidedDecodingContext)``, where
    the configuration names it at start-up, otherwise when the first request needs it.
    """

    @abstractmethod
    def unsupported(self, spec: GrammarSpec) -> list[str]:
        """Why this constraint can't be enforced as a whole, each reason with the keyword's path
        (``properties.age.multipleOf: ...``); empty = it can. Called before ``compile``, in the same
        thread.

        Raises:
            RequestError: if the constraint is malformed.
        """

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Make a constraint ready. Called in a thread beside the step loop, several at once; may be
        slow, and is given up after ``guided_decoding.compile_timeout_s``, which ends the request
        but can't end the thread: refuse in ``unsupported`` what would take forever.

        Raises:
            RequestError: if the constraint is malformed.
        """

    def fill_bitmasks(
        self, grammars: Sequence[Grammar], bitmask: Tensor, rows: Sequence[int]
    ) -> None:
        """``fill_bitmask`` of several matchers of this backend, each in a row of its own.

        Called in the step loop, once a step; override it where the library has something faster
        than a loop.
        """
        for grammar, row in zip(grammars, rows, strict=True):
            grammar.fill_bitmask(bitmask, row)
