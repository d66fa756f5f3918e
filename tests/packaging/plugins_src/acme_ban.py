"""``ban``: never these tokens; a request names more of them."""

from __future__ import annotations

from hotshoe.api import Component, LogitsBatch, LogitsProcessor, PluginOptions, hookimpl


class BanOptions(PluginOptions):
    token_ids: tuple[int, ...] = ()


class Ban(LogitsProcessor):
    def __init__(self, options: BanOptions) -> None:
        self._token_ids = options.token_ids

    def apply(self, batch: LogitsBatch) -> None:
        for row, extra_args in enumerate(batch.extra_args):
            asked = (extra_args or {}).get("ban", [])
            if not isinstance(asked, list):
                raise ValueError(f"extra_args.ban is {asked!r}; allowed: a list of token ids")
            batch.logits[row, [*self._token_ids, *asked]] = float("-inf")


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="logits_processor/0",
        factory=lambda options, context: Ban(options),
        options=BanOptions,
    )
