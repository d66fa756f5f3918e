"""``llguidance``: JSON schemas, regular expressions and Lark grammars through the llguidance
library (derivatives of regular expressions and an Earley parser).
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


class LlguidanceOptions(PluginOptions):
    """How JSON looks."""

    max_whitespace: int = Field(
        default=2,
        ge=0,
        le=1000,
        description="Most whitespace characters between the parts of a JSON text; 0: none at all. "
        "Without a bound a model can go on with blanks until it runs out of tokens.",
    )
    additional_properties: bool = Field(
        default=True,
        description="Let objects have properties that their schema doesn't name, where it doesn't "
        "forbid them. Small models then go on and on with such. Outputs satisfy the schema either "
        "way.",
    )


def build(options: LlguidanceOptions, context: GuidedDecodingContext) -> GuidedDecodingBackend:
    """The factory; imports the library."""
    from hotshoe_guided_decoding.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(options, context)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the backend."""
    remedy = "llguidance is not installed; pip install 'hotshoe[llguidance]'"
    return Component(
        contract="guided_decoding/0",
        factory=build,
        options=LlguidanceOptions,
        unsupported=() if find_spec("llguidance") else (remedy,),
        auto_priority=10,
    )
