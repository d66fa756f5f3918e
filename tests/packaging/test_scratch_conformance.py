"""The conformance suites take a stranger's plugin as they take a built-in one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hotshoe.api import Component
from hotshoe.testing.attention import AttentionConformance
from hotshoe.testing.eviction import EvictionConformance
from hotshoe.testing.guided_decoding import GuidedDecodingConformance
from hotshoe.testing.logits_processor import LogitsProcessorConformance
from hotshoe.testing.sampler import SamplerConformance
from hotshoe.testing.scheduler import SchedulerConformance
from hotshoe.testing.spec_decode import ProposerConformance

SOURCES = Path(__file__).parent / "plugins_src"


def component_of(module: str) -> Component:
    found: Component = runpy.run_path(str(SOURCES / f"{module}.py"))["hotshoe_component"]()
    return found


class TestLifo(SchedulerConformance):
    def component(self) -> Component:
        return component_of("acme_lifo")


class TestNaiveAttention(AttentionConformance):
    def component(self) -> Component:
        return component_of("acme_attention")


class TestOracle(ProposerConformance):
    options: ClassVar = {"texts": [[3] * 30, [1, 1, 2]]}

    def component(self) -> Component:
        return component_of("acme_drafter")


class TestMostRecent(EvictionConformance):
    def component(self) -> Component:
        return component_of("acme_eviction")


class TestAnyBlock(EvictionConformance):
    options: ClassVar = {"seed": 3}

    def component(self) -> Component:
        return component_of("acme_random")


class TestBan(LogitsProcessorConformance):
    options: ClassVar = {"token_ids": [4]}
    extra_args: ClassVar = {"ban": [5, 6]}

    def component(self) -> Component:
        return component_of("acme_ban")


class TestChoice(GuidedDecodingConformance):
    def component(self) -> Component:
        return component_of("acme_choice")


class TestRunnerUp(SamplerConformance):
    def component(self) -> Component:
        return component_of("acme_sampler")

    def target(self, logits: NDArray[np.float32], chosen: Any) -> NDArray[np.float64]:
        first, second = np.argsort(-logits, kind="stable")[:2]
        probs = np.zeros(len(logits))
        probs[second if np.isfinite(logits[second]) else first] = 1
        return probs
