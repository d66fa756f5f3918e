"""``choice``: one of a few texts, byte by byte; a compilation can be held up from outside."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from hotshoe.api import (
    CompiledGrammar,
    Component,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    GuidedDecodingContext,
    PluginOptions,
    RequestError,
    hookimpl,
)

RELEASED = threading.Event()
"""What a slow compilation waits for."""


class ChoiceOptions(PluginOptions):
    is_slow: bool = False


class ChoiceGrammar(Grammar):
    """The texts that can still come, for each number of tokens accepted so far."""

    def __init__(self, choices: list[bytes], context: GuidedDecodingContext) -> None:
        self._context = context
        self._states: list[list[bytes]] = [choices]

    def accept(self, token_ids: Sequence[int]) -> bool:
        before = len(self._states)
        for token_id in token_ids:
            following = self._after(token_id)
            if following is None:
                del self._states[before:]
                return False
            self._states.append(following)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        num_allowed = 0
        for token_id in token_ids:
            if not self.accept([token_id]):
                break
            num_allowed += 1
        self.rollback(num_allowed)
        return num_allowed

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        bitmask[row] = 0
        for token_id in range(self._context.vocab_size):
            if self._after(token_id) is not None:
                word, bit = divmod(token_id, 32)
                bitmask[row, word] |= 1 << bit if bit < 31 else -(1 << 31)

    @property
    def is_terminated(self) -> bool:
        return self._states[-1] in ([b""], [])

    def _after(self, token_id: int) -> list[bytes] | None:
        """What can follow a token; None = it isn't allowed."""
        left = self._states[-1]
        if token_id in self._context.eos_token_ids:
            return [] if b"" in left or not left else None
        table = self._context.token_bytes
        text = table[token_id] if token_id < len(table) else b""
        if not text:
            return None
        return [one[len(text) :] for one in left if one.startswith(text)] or None


class ChoiceCompiled(CompiledGrammar):
    def __init__(self, choices: list[bytes], context: GuidedDecodingContext) -> None:
        self._choices = choices
        self._context = context

    def matcher(self) -> Grammar:
        return ChoiceGrammar(self._choices, self._context)


class ChoiceBackend(GuidedDecodingBackend):
    def __init__(self, options: ChoiceOptions, context: GuidedDecodingContext) -> None:
        self._options = options
        self._context = context

    def unsupported(self, spec: GrammarSpec) -> list[str]:
        return [] if spec.kind == "choice" else [f"{spec.kind!r} is beyond this backend"]

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if self._options.is_slow and not RELEASED.wait(timeout=60):
            raise RuntimeError("nobody went on while the constraint was compiled")
        choices = json.loads(spec.value)
        wrong = [choice for choice in choices if not choice.isascii()]
        if wrong:
            raise RequestError(f"choice {wrong[0]!r} is not ASCII; use ASCII texts only")
        return ChoiceCompiled([choice.encode() for choice in choices], self._context)


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="guided_decoding/0", factory=ChoiceBackend, options=ChoiceOptions)
