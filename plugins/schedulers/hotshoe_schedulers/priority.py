"""``priority``: lower priority values first, ties in order of arrival; the last in that order gives
way.
"""

from __future__ import annotations

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


class PriorityOptions(PluginOptions):
    """None: there is nothing to choose."""


class PriorityScheduler(Scheduler):
    """Strict priorities: a waiting request takes the place of running ones that come after it."""

    def schedule(self, step: StepPlanner) -> None:
        serve(step, order=by_priority)


def by_priority(request: RequestView) -> tuple[int, int]:
    """Sort key: priority, then arrival."""
    return request.priority, request.arrival_index


def build(options: PriorityOptions, context: SchedulerContext) -> PriorityScheduler:
    """The factory."""
    return PriorityScheduler()


@hookimpl
def hotshoe_component() -> Component:
    """Describe the scheduler."""
    return Component(contract="scheduler/0", factory=build, options=PriorityOptions)
