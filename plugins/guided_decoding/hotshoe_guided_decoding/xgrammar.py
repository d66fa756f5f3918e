"""``xgrammar``: JSON schemas, regular expressions, EBNF grammars and structural tags through the
xgrammar library (Dong et al. 2024, arXiv:2411.15100).
"""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from hotshoe.api import (
    Component,
    GuidedDecodingBackend,
    GuidedDecodingContext,
    PluginOptions,
    hookimpl,
)


class XgrammarOptions(PluginOptions):
    """How JSON looks, and what compiling may cost."""

    max_whitespace: int = Field(
        default=2,
        ge=0,
        le=1000,
        description="Most whitespace characters between the parts of a JSON text; 0: none at all. "
        "Without a bound a model can go on with blanks until it runs out of tokens.",
    )
    additional_properties: bool = Field(
        default=False,
        description="Let objects have properties that their schema doesn't name, where it doesn't "
        "forbid them. Outputs satisfy the schema either way.",
    )
    num_threads: int = Field(
        default=1, ge=1, le=64, description="Threads that compile one constraint."
    )


def build(options: XgrammarOptions, context: GuidedDecodingContext) -> GuidedDecodingBackend:
    """The factory; imports the library."""
    from hotshoe_guided_decoding.xgrammar_backend import XgrammarBackend

    return XgrammarBackend(options, context)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the backend."""
    missing = () if find_spec("xgrammar") else ("xgrammar is not installed; pip install xgrammar",)
    return Component(
        contract="guided_decoding/0",
        factory=build,
        options=XgrammarOptions,
        unsupported=missing,
        auto_priority=20,
    )
