"""The Llama family: pre-norm decoders with rotary grouped-query attention and a gated SiLU MLP."""

from __future__ import annotations

from hotshoe.api import Component, Model, ModelCapabilities, ModelContext, PluginOptions, hookimpl

CAPABILITIES = ModelCapabilities(
    architectures=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    )
)


def build(options: PluginOptions, context: ModelContext) -> Model:
    """The model without weights; torch is imported here, not with the module."""
    from hotshoe_models.llama.model import LlamaModel

    return LlamaModel(context)


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="model/0", factory=build, capabilities=CAPABILITIES, auto_priority=1)
