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


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The parser of one section.

    Attributes:
        loaded: None: none is used.
        why: what ``auto`` went by; empty if the config names the parser, or says that there is
            none.
    """

    loaded: LoadedPlugin | None
    why: str = ""


def choose_parsers(config: EngineConfig, chat_template: str | None) -> dict[str, ParserChoice]:
    """Choose the parsers by section, by config or by the chat template.

    Raises:
        PluginError, ConfigError: if a configured one can't be used.
    """
    return _choose_all(_registry(config), config, chat_template or "")


def load_parsers(config: EngineConfig, tokenizer: Tokenizer) -> Parsers:
    """Choose and build the parsers.

    Raises:
        PluginError, ConfigError: if a configured one can't be used.
    """
    registry, server = _registry(config), config.server
    choices = _choose_all(registry, config, tokenizer.chat_template or "")
    for section, choice in choices.items():
        if choice.loaded is not None and choice.why:
            registry.activate(choice.loaded)
            logger.info("%s=%s (auto: %s)", section, choice.loaded.info.name, choice.why)
    tools, reasoning = choices[TOOL_SECTION].loaded, choices[REASONING_SECTION].loaded
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


def _choose_all(
    registry: PluginRegistry, config: EngineConfig, template: str
) -> dict[str, ParserChoice]:
    server = config.server
    tools = _choose(registry, TOOL_PARSERS, server.tool_parser, template)
    if tools.loaded is None and server.tool_parser.name == AUTO:
        why = "the chat template has the marks of no other"
        tools = ParserChoice(registry.load(TOOL_PARSERS, DEFAULT_TOOL_PARSER), why)
    reasoning = _choose(registry, REASONING_PARSERS, server.reasoning_parser, template)
    return {TOOL_SECTION: tools, REASONING_SECTION: reasoning}


def _choose(
    registry: PluginRegistry, kind: str, selected: Selection, template: str
) -> ParserChoice:
    if selected.name is None:
        return ParserChoice(None)
    if selected.name != AUTO:
        return ParserChoice(registry.load(kind, selected.name))
    for candidate in registry.candidates(kind):
        if isinstance(candidate, LoadedPlugin):
            marker = _marker(candidate.component.capabilities, template)
            if marker is not None:
                return ParserChoice(candidate, f"the chat template has {marker!r}")
    return ParserChoice(None, "the chat template has the marks of none")


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
