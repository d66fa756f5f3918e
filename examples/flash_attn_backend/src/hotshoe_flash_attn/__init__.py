"""``flash_attn``: attention by the kernels of the library flash-attn (arXiv:2307.08691)."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    Component,
    PluginOptions,
    hookimpl,
)

CAPABILITIES = AttentionCapabilities(
    devices=("cuda",), dtypes=("bfloat16", "float16"), kv_dtypes=("bfloat16", "float16")
)


class FlashAttnOptions(PluginOptions):
    """What users may write under ``attention.options``; anything else is refused."""

    page_multiple: int = Field(
        default=256,
        ge=1,
        description="what cache.block_size must be a multiple of: 256 for FlashAttention 2 as "
        "released, less for some builds of it",
    )


def build(options: FlashAttnOptions, context: AttentionContext) -> AttentionBackend:
    """The backend; torch and the library are imported here, not with the module."""
    from hotshoe_flash_attn.backend import FlashAttnBackend

    return FlashAttnBackend(CAPABILITIES, context, page_multiple=options.page_multiple)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the plugin."""
    missing = () if find_spec("flash_attn") else ("the library is missing: pip install flash-attn",)
    return Component(
        contract="attention/0",
        factory=build,
        options=FlashAttnOptions,
        capabilities=CAPABILITIES,
        unsupported=missing,
    )
