"""The reference attention backend passes the suite that every backend has to pass."""

from __future__ import annotations

from hotshoe.api import AttentionSpec, Component
from hotshoe.testing.attention import SPECS, AttentionConformance
from hotshoe.testing.attention_reference import TOLERANCES
from hotshoe_attention import torch_sdpa


class TestTorchSdpa(AttentionConformance):
    def component(self) -> Component:
        return torch_sdpa.hotshoe_component()

    def tolerance(self, spec: AttentionSpec) -> float:
        return TOLERANCES[spec.dtype]  # it computes in the model's dtype whatever the pages hold

    def test_refuses_no_spec_of_the_suite_but_pages_of_int8(self) -> None:
        backend = self.backend()
        refused = {name for name, spec in SPECS.items() if backend.supports(spec)}
        assert refused == {"float32-on-int8", "bfloat16-on-int8"}
