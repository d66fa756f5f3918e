"""The guided-decoding part of assembly: which backends are loaded, and when each is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from hotshoe.api import GuidedDecodingBackend, GuidedDecodingContext
from hotshoe.engine.resolution import AUTO, Choice, Resolver
from hotshoe.errors import ConfigError
from hotshoe.text.tokenizer import Tokenizer
from hotshoe.worker.grammar_compiler import GuidedDecodingParts

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SECTION = "guided_decoding"
OTHERS = "guided_decoding.others"


def choose_guided_decoding(resolver: Resolver) -> None:
    """Fill the place of the first backend and load the others.

    Under ``auto`` an engine without one starts all the same: requests with a constraint are refused
    with the reasons.

    Raises:
        ConfigError: if a named one doesn't fit, or two have the same name.
        PluginError: if a named one can't be loaded.
    """
    config = resolver.config.guided_decoding
    try:
        first = resolver.choose(SECTION)
    except ConfigError as error:
        if config.name != AUTO or config.options or config.others:
            raise
        logger.info("guided_decoding: off: %s", error)
        return
    names = [first.info.name] if first else []
    for entry in config.others:
        if entry.name in names:
            raise ConfigError(
                f"{OTHERS} names {entry.name!r}, which is loaded already; name each backend once"
            )
        names.append(entry.name)
        resolver.resolution.other_backends.append(
            resolver.named(SECTION, entry.name, entry.options)
        )


def guided_decoding_parts(
    resolver: Resolver, tokenizer: Tokenizer, vocab_size: int, device: torch.device
) -> GuidedDecodingParts:
    """The backends and limits of a worker. What the config names is built now, so that what can't
    work stops the start-up; what ``auto`` picked is built when a request needs it.
    """
    config = resolver.config.guided_decoding
    first = resolver.resolution.choices.get(SECTION)
    if first is None:
        if config.name is None:
            return GuidedDecodingParts()
        refused = resolver.resolution.refused.get(SECTION, [])
        listed = "; ".join(f"{one.info.name}: {'; '.join(one.reasons)}" for one in refused)
        return GuidedDecodingParts(why_none=f"no guided-decoding backend fits: {listed or 'none'}")
    context = cache(partial(_context, tokenizer, vocab_size))
    choices = [first, *resolver.resolution.other_backends]
    parts = GuidedDecodingParts(
        backends={one.info.name: _builder(resolver, one, context) for one in choices},
        jump_forward=(device.type == "cpu" if config.jump_forward is None else config.jump_forward),
        fallback=config.fallback,
        max_spec_bytes=config.max_spec_bytes,
        compile_timeout_s=config.compile_timeout_s,
        num_compile_threads=config.num_compile_threads,
        cache_size=config.cache_size,
    )
    for choice in choices:
        if choice is not first or config.name != AUTO:
            parts.backends[choice.info.name]()
    return parts


def _builder(
    resolver: Resolver, choice: Choice, context: Callable[[], GuidedDecodingContext]
) -> Callable[[], GuidedDecodingBackend]:
    @cache
    def build() -> GuidedDecodingBackend:
        backend: GuidedDecodingBackend = resolver.build(choice, context())
        return backend

    return build


def _context(tokenizer: Tokenizer, vocab_size: int) -> GuidedDecodingContext:
    token_bytes = list(tokenizer.token_bytes())
    for token_id in {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}:
        if token_id < len(token_bytes):
            # their text is left out of the output, so it can be no part of what is matched
            token_bytes[token_id] = b""
    return GuidedDecodingContext(
        vocab_size=vocab_size,
        token_bytes=token_bytes,
        eos_token_ids=tokenizer.eos_token_ids,
        tokenizer_json=tokenizer.tokenizer_json,
    )
