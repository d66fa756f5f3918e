"""The plugin kinds: where each is configured, which contract version the core speaks, and what it
must implement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PluginKind:
    """One extension point.

    Attributes:
        name: plural name; the entry-point group is ``hotshoe.<name>``.
        section: dotted path of the config section that selects it (``cache.eviction`` holds
            ``name`` and ``options``).
        contract: name of the contract, without the version (``scheduler``).
        version: contract version that this core speaks. A plugin written for another one is
            refused.
        interface: ``module:attribute`` of the ABC that the factory's result must be an instance of.
        is_experimental: whether the contract has fewer than two implementations and may still
            change shape.
        is_list: whether the section selects any number of plugins (``sampler.logits_processors``).
    """

    name: str
    section: str
    contract: str
    version: int
    interface: str
    is_experimental: bool = False
    is_list: bool = False

    @property
    def group(self) -> str:
        """Entry-point group in a distribution's metadata."""
        return f"hotshoe.{self.name}"

    @property
    def current(self) -> str:
        """The contract as a plugin states it, such as ``scheduler/0``."""
        return f"{self.contract}/{self.version}"


_ALL = (
    PluginKind("schedulers", "scheduler", "scheduler", 0, "hotshoe.api.scheduler:Scheduler"),
    PluginKind(
        "attention", "attention", "attention", 0, "hotshoe.api.attention:AttentionBackend", True
    ),
    PluginKind(
        "spec_decode", "spec_decode", "spec_decode", 0, "hotshoe.api.spec_decode:Proposer", True
    ),
    PluginKind("samplers", "sampler", "sampler", 0, "hotshoe.api.sampler:Sampler", True),
    PluginKind(
        "guided_decoding",
        "guided_decoding",
        "guided_decoding",
        0,
        "hotshoe.api.guided_decoding:GuidedDecodingBackend",
    ),
    PluginKind("models", "model", "model", 0, "hotshoe.api.model:Model", True),
    PluginKind("kernels", "kernels", "kernels", 0, "hotshoe.api.kernels:Kernels", True),
    PluginKind(
        "quantization",
        "quantization",
        "quantization",
        0,
        "hotshoe.api.quantization:Quantization",
        True,
    ),
    PluginKind("executors", "executor", "executor", 0, "hotshoe.api.executor:Executor", True),
    PluginKind(
        "kv_eviction",
        "cache.eviction",
        "kv_eviction",
        0,
        "hotshoe.api.kv_eviction:EvictionPolicy",
        True,
    ),
    PluginKind(
        "logits_processors",
        "sampler.logits_processors",
        "logits_processor",
        0,
        "hotshoe.api.logits_processor:LogitsProcessor",
        True,
        True,
    ),
    PluginKind(
        "tool_parsers",
        "server.tool_parser",
        "tool_parser",
        0,
        "hotshoe.api.tool_parsers:ToolParser",
    ),
    PluginKind(
        "reasoning_parsers",
        "server.reasoning_parser",
        "reasoning_parser",
        0,
        "hotshoe.api.reasoning_parsers:ReasoningParser",
        True,
    ),
)

KINDS: dict[str, PluginKind] = {kind.name: kind for kind in _ALL}
"""Every kind by its plural name. ``kv_connectors`` join when the parts that call them exist."""
