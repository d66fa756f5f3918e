"""``draft_model``: a smaller model with the same tokens drafts (arXiv:2211.17192,
arXiv:2302.01318).
"""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import Component, PluginOptions, Proposer, ProposerContext, hookimpl


class DraftModelOptions(PluginOptions):
    """Options of the draft model."""

    model: str = Field(description="model that drafts, as model.path: a folder, file or hub id")
    num_draft_tokens: int = Field(default=4, ge=1, le=16, description="drafts per request and step")


def build(options: DraftModelOptions, context: ProposerContext) -> Proposer:
    """The proposer without weights; torch is imported here, not with the module."""
    from hotshoe_spec_decode.draft_model.proposer import DraftModelProposer

    return DraftModelProposer(options, context)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the proposer."""
    return Component(contract="spec_decode/0", factory=build, options=DraftModelOptions)
