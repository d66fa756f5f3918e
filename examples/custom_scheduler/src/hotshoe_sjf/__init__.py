"""``sjf``: the request with the least left to compute runs first; waiting makes it shorter."""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import (
    Component,
    PluginOptions,
    RequestView,
    Scheduler,
    SchedulerContext,
    StepPlanner,
    hookimpl,
    serve,
)


class SjfOptions(PluginOptions):
    """What users may write under ``scheduler.options``; anything else is refused."""

    aging: float = Field(
        default=100.0,
        ge=0,
        allow_inf_nan=False,
        description="tokens that a request is forgiven per second since its arrival; 0 = none, "
        "and then long requests can wait for ever",
    )


class ShortestJobFirst(Scheduler):
    """Least remaining work first, bounded by ``max_tokens``, as the real length isn't known."""

    def __init__(self, options: SjfOptions) -> None:
        self._aging = options.aging

    def schedule(self, step: StepPlanner) -> None:
        serve(step, order=self._cost)

    def _cost(self, request: RequestView) -> tuple[float, int]:
        """Sort key. Everybody ages at one rate, so what counts is who arrived how much earlier:
        the time of arrival stands for the time waited, and the key needs no clock.
        """
        # a running request counts what it has computed, a waiting one what its prefix hit supplies
        done = max(request.num_computed_tokens, request.num_cached_tokens)
        remaining = request.max_num_tokens - done
        return remaining + self._aging * request.arrival_time_s, request.arrival_index


def build(options: SjfOptions, context: SchedulerContext) -> ShortestJobFirst:
    """Make the scheduler, once per engine."""
    return ShortestJobFirst(options)


@hookimpl
def hotshoe_component() -> Component:
    """Describe the plugin."""
    return Component(contract="scheduler/0", factory=build, options=SjfOptions)
