"""``runner_up``: always the second most likely token."""

from hotshoe.api import Candidates, Component, SampleInput, Sampler, hookimpl


class RunnerUp(Sampler):
    def candidates(self, inputs: SampleInput) -> Candidates:
        import torch

        second = inputs.logits.topk(2, -1).indices[:, 1:]
        return Candidates(torch.ones(second.shape), second)


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="sampler/0", factory=lambda options, context: RunnerUp())
