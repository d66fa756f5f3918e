"""Native attention passes the suite of every backend, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest

from hotshoe.api import Component
from hotshoe.testing.attention import SPECS, AttentionConformance
from hotshoe_attention import cpu
from hotshoe_native.isa import available

AVAILABLE = {isa.name for isa in available()}


class NativeConformance(AttentionConformance):
    """The suite on one instruction set."""

    isa: str

    def component(self) -> Component:
        return cpu.hotshoe_component()

    def options(self) -> dict[str, Any]:
        return {"isa": self.isa}

    def test_refuses_only_float16(self) -> None:
        backend = self.backend()
        refused = {name for name, spec in SPECS.items() if backend.supports(spec)}
        assert refused == {"float16"}


@pytest.mark.skipif("avx512" not in AVAILABLE, reason="the CPU has no AVX-512 with bf16")
class TestAvx512(NativeConformance):
    isa = "avx512"


@pytest.mark.skipif("avx2" not in AVAILABLE, reason="the CPU has no AVX2")
class TestAvx2(NativeConformance):
    isa = "avx2"


class TestPortable(NativeConformance):
    isa = "portable"
