"""``lifo``: the request that came last runs first."""

from hotshoe.api import Component, PluginOptions, Scheduler, StepPlanner, hookimpl, serve


class Lifo(Scheduler):
    def schedule(self, step: StepPlanner) -> None:
        serve(step, order=lambda request: -request.arrival_index)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="scheduler/0", factory=lambda options, context: Lifo(), options=PluginOptions
    )
