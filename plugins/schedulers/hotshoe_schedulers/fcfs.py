"""``fcfs``: first come, first served; the request admitted last gives way when blocks run out."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    PluginOptions,
    Scheduler,
    SchedulerContext,
    StepPlanner,
    hookimpl,
    serve,
)


class FcfsOptions(PluginOptions):
    """None: there is nothing to choose."""


class FcfsScheduler(Scheduler):
    """Running requests first, then waiting ones in order of arrival."""

    def schedule(self, step: StepPlanner) -> None:
        serve(step)


def build(options: FcfsOptions, context: SchedulerContext) -> FcfsScheduler:
    """The factory."""
    return FcfsScheduler()


@hookimpl
def hotshoe_component() -> Component:
    """Describe the scheduler."""
    return Component(contract="scheduler/0", factory=build, options=FcfsOptions)
