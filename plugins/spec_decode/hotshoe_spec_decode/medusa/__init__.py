"""``medusa``: heads over the target's last hidden state, each of which drafts one of the next
tokens (arXiv:2401.10774).
"""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import Component, PluginOptions, Proposer, ProposerContext, hookimpl


class MedusaOptions(PluginOptions):
    """Options of the Medusa proposer."""

    model: str = Field(
        description="Medusa heads that were trained for this model: a folder or hub id"
    )
    num_draft_tokens: int | None = Field(
        default=None,
        ge=1,
        description="drafts per request and step, as many heads are used; none: all heads",
    )


def build(options: MedusaOptions, context: ProposerContext) -> Proposer:
    """The proposer without weights; torch is imported here, not with the module."""
    from hotshoe_spec_decode.medusa.proposer import MedusaProposer

    return MedusaProposer(options, context)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the proposer."""
    return Component(contract="spec_decode/0", factory=build, options=MedusaOptions)
