"""``eagle``: a small layer over the target's own hidden states drafts token by token
(arXiv:2401.15077, arXiv:2503.01840).
"""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import Component, PluginOptions, Proposer, ProposerContext, hookimpl


class EagleOptions(PluginOptions):
    """Options of the EAGLE proposer."""

    model: str = Field(
        description="EAGLE-1 or EAGLE-3 head that was trained for this model: a folder or hub id"
    )
    num_draft_tokens: int = Field(default=4, ge=1, le=16, description="drafts per request and step")


def build(options: EagleOptions, context: ProposerContext) -> Proposer:
    """The proposer without weights; torch is imported here, not with the module."""
    from hotshoe_spec_decode.eagle.proposer import EagleProposer

    return EagleProposer(options, context)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the proposer."""
    return Component(contract="spec_decode/0", factory=build, options=EagleOptions)
