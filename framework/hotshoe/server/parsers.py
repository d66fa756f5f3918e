"""The parsers of a server: which plugins read tool calls and reasoning, by config or by the chat
template.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotshoe.api import (
    ReasoningParser,
    ReasoningParserCapabilities,
    ReasoningParserContext,
    ToolParser,
    ToolParserCapabilities,
    ToolParserContext,
)
from hotshoe.config import EngineConfig
from hotshoe.config.schema import ReasoningParserConfig, ToolParserConfig
from hotshoe.plugins import LoadedPlugin, PluginRegistry
from hotshoe.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO = "auto"
TOOL_PARSERS, REASONING_PARSERS = "tool_parsers", "reasoning_parsers"
DEFAULT_TOOL_PARSER = "hermes"
TOOL_SECTION, REASONING_SECTION = "server.tool_parser", "server.reasoning_parser"

Capabilities = ToolParserCapabilities | ReasoningParserCapabilities
Selection = ToolParserConfig | ReasoningParserConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """What reads the outputs of a model.

    Attributes:
        tools: None: requests with tools are refused.
        call_id_length: letters and digits of a call's id; None: as OpenAI's.
        reasoning: None: everything is the answer.
        keeps_special_tokens: whether a marker of ``tools``, and of ``reasoning``, is a special
            token, which texts leave out unless told otherwise.
    """

    tools: ToolParser | None = None
    call_id_length: int | None = None
    reasoning: ReasoningParser | None = None
    keeps_special_tokens: tuple[bool, bool] = (False, False)


def load_parsers(config: EngineConfig, tokenizer: Tokenizer) -> Parsers:
    """Choose and build the parsers.

    Raises:
        PluginError, ConfigError: if a configured one can't be used.
    """
    registry, server = _registry(config), config.server
    template = tokenizer.chat_template or ""
    tools = _choose(registry, TOOL_PARSERS, TOOL_SECTION, server.tool_parser, template)
    reasoning = _choose(
        registry, REASONING_PARSERS, REASONING_SECTION, server.reasoning_parser, template
    )
    tool_context = ToolParserContext(chat_template=tokenizer.chat_template)
    reasoning_context = ReasoningParserContext(chat_template=tokenizer.chat_template)

    def build(loaded: LoadedPlugin | None, options: Any, context: Any, section: str) -> Any:
        if loaded is None:
            return None
        return registry.build(loaded, options, context, section=section)

    known = _tool_capabilities(tools)
    return Parsers(
        tools=build(tools, server.tool_parser.options, tool_context, TOOL_SECTION),
        call_id_length=known.call_id_length if known else None,
        reasoning=build(
            reasoning, server.reasoning_parser.options, reasoning_context, REASONING_SECTION
        ),
        keeps_special_tokens=(_is_special(tools, tokenizer), _is_special(reasoning, tokenizer)),
    )


def check_parsers(config: EngineConfig) -> None:
    """Make sure that the parsers which the config names can be used, before anything is loaded.

    Raises:
        PluginError, ConfigError: if one can't.
    """
    registry, server = _registry(config), config.server
    contexts: list[tuple[str, str, Selection, Callable[[], Any]]] = [
        (TOOL_PARSERS, TOOL_SECTION, server.tool_parser, ToolParserContext),
        (REASONING_PARSERS, REASONING_SECTION, server.reasoning_parser, ReasoningParserContext),
    ]
    for kind, section, selected, context in contexts:
        if selected.name not in (AUTO, None):
            loaded = registry.load(kind, selected.name)
            registry.build(loaded, selected.options, context(), section=section)


def _registry(config: EngineConfig) -> PluginRegistry:
    plugins = config.plugins
    return PluginRegistry(plugins.allow, plugins.deny, safe_mode=plugins.safe_mode)


def _choose(
    registry: PluginRegistry, kind: str, section: str, selected: Selection, template: str
) -> LoadedPlugin | None:
    if selected.name is None:
        return None
    if selected.name != AUTO:
        return registry.load(kind, selected.name)
    for candidate in registry.candidates(kind):
        if isinstance(candidate, LoadedPlugin):
            marker = _marker(candidate.component.capabilities, template)
            if marker is not None:
                registry.activate(candidate)
                name = candidate.info.name
                logger.info("%s=%s (auto: the chat template has %r)", section, name, marker)
                return candidate
    if kind == TOOL_PARSERS:
        why = "auto: the chat template has the marks of no other"
        logger.info("%s=%s (%s)", section, DEFAULT_TOOL_PARSER, why)
        return registry.load(kind, DEFAULT_TOOL_PARSER)
    return None


def _marker(capabilities: object, template: str) -> str | None:
    if not isinstance(capabilities, Capabilities):
        return None
    return next((one for one in capabilities.template_markers if one in template), None)


def _tool_capabilities(loaded: LoadedPlugin | None) -> ToolParserCapabilities | None:
    found = loaded.component.capabilities if loaded else None
    return found if isinstance(found, ToolParserCapabilities) else None


def _is_special(loaded: LoadedPlugin | None, tokenizer: Tokenizer) -> bool:
    capabilities = loaded.component.capabilities if loaded else None
    if not isinstance(capabilities, Capabilities):
        return False
    encoded = [tokenizer.encode(one, add_special_tokens=False) for one in capabilities.markers]
    return any(len(ids) == 1 and ids[0] in tokenizer.special_token_ids for ids in encoded)
