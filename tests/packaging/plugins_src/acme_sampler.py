"""``runner_up``: always the second most likely token."""

from hotshoe.api import Candidates, Component, SampleInput, Sampler, hookimpl


class RunnerUp(Sampler):
    def candidates(self, inputs: SampleInput) -> Candidates:
        import torch

        best = inputs.logits.argmax(-1, keepdim=True)
        others = inputs.logits.scatter(1, best, -torch.inf)
        second = others.argmax(-1, keepdim=True)
        # a mask may have left one token
        chosen = torch.where(others.gather(1, second).isfinite(), second, best)
        return Candidates(torch.ones_like(chosen, dtype=torch.float32), chosen)


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="sampler/0", factory=lambda options, context: RunnerUp())
