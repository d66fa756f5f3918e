"""``oracle``: drafts what the options say comes next, for requests that began like that."""

from pydantic import Field

from hotshoe.api import (
    Component,
    DraftTokens,
    PluginOptions,
    ProposeInput,
    Proposer,
    Requirements,
    hookimpl,
)


class OracleOptions(PluginOptions):
    texts: list[list[int]] = Field(description="token ids of prompts with their outputs")
    num_draft_tokens: int = Field(default=3, ge=1)


class Oracle(Proposer):
    requirements = Requirements(needs_finished_requests=True)

    def __init__(self, options: OracleOptions) -> None:
        self.max_draft_tokens = options.num_draft_tokens
        self._texts = options.texts
        self.forgotten: list[str] = []
        BUILT.append(self)

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        drafts = []
        for token_ids, most in zip(inputs.token_ids, inputs.max_draft_tokens, strict=True):
            known = token_ids.tolist()
            start, end = len(known), len(known) + min(most, self.max_draft_tokens)
            texts = [text for text in self._texts if text[:start] == known]
            drafts.append(texts[0][start:end] if texts else [])
        return DraftTokens(token_ids=drafts)

    def forget(self, request_ids: list[str]) -> None:
        self.forgotten += request_ids


BUILT: list[Oracle] = []


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="spec_decode/0",
        factory=lambda options, context: Oracle(options),
        options=OracleOptions,
    )
