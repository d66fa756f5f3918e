"""The last layer attends only from tokens whose logits are wanted, and nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafts.heads import write_eagle1, write_eagle3
from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionLayerView,
    AttentionSpec,
    Component,
    DraftTokens,
    KVCacheSpec,
    KVLayout,
    LayerCache,
    ProposeInput,
    Proposer,
    Requirements,
)
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe_attention import cpu, torch_sdpa

NUMBERS = random.Random(3)
PROMPT = [NUMBERS.randrange(256) for _ in range(40)]
OTHERS = [[NUMBERS.randrange(256) for _ in range(length)] for length in (3, 17, 1)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
BACKENDS = {"cpu": cpu.hotshoe_component, "torch_sdpa": torch_sdpa.hotshoe_component}
Queries = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """Of ``forward``: in which layer, and how many rows it got."""

    layer: int
    num_queries: int
    num_tokens: int


class Counting(AttentionBackend):
    """Another backend, with a note of each call. Nothing is recorded, which would hide calls."""

    def __init__(self, component: Component, *, takes_fewer_queries: bool) -> None:
        context = AttentionContext(
            device=torch.device("cpu"),
            block_size=16,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=256,
        )
        inner = component.factory(component.options(), context)
        assert isinstance(inner, AttentionBackend)
        self._inner = inner
        self.capabilities = replace(
            inner.capabilities, is_recordable=False, takes_fewer_queries=takes_fewer_queries
        )
        self.calls: list[Call] = []
        self.num_built = 0

    def supports(self, spec: AttentionSpec) -> list[str]:
        return self._inner.supports(spec)

    def layout(self, spec: AttentionSpec) -> KVLayout:
        return self._inner.layout(spec)

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Any:
        self.num_built += 1
        return self._inner.build_metadata(batch, group)

    def forward(
        self,
        layer: AttentionLayerView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        metadata: Any,
    ) -> Tensor:
        self.calls.append(Call(layer.layer_index, q.shape[0], k.shape[0]))
        return self._inner.forward(layer, q, k, v, cache, metadata)

    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        self._inner.copy_slots(caches, source, target)

    def taken(self) -> list[tuple[Queries, ...]]:
        """By step, the queries and tokens of each layer; what was noted is forgotten."""
        steps: list[list[Queries]] = []
        for call in self.calls:
            if call.layer == 0:
                steps.append([])
            steps[-1].append((call.num_queries, call.num_tokens))
        self.calls.clear()
        return [tuple(step) for step in steps]


class Reads(Proposer):
    """Wants the hidden states of a layer, and drafts nothing."""

    max_draft_tokens = 4

    def __init__(self, layer: int) -> None:
        self.requirements = Requirements(hidden_state_layers=(layer,))

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        return DraftTokens(token_ids=[[] for _ in inputs.request_ids])


Build = Callable[..., tuple[LLM, Counting]]


@pytest.fixture
def build(tiny_path: Path) -> Iterator[Build]:
    """Builds engines of two layers, and closes them after the test."""
    built: list[LLM] = []

    def one(
        name: str = "cpu", *, takes_fewer_queries: bool = True, **settings: Any
    ) -> tuple[LLM, Counting]:
        backend = Counting(BACKENDS[name](), takes_fewer_queries=takes_fewer_queries)
        parts = {"dtype": "float32", "kernels": "cpu", "quantization": "none", "max_num_seqs": 8}
        built.append(
            LLM(str(tiny_path), max_model_len=256, attention=backend, **(parts | settings))
        )
        return built[-1], backend

    yield one
    for llm in built:
        llm.close()


def drafter(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "options": {"model": str(path)}, "adaptive": False}


def tokens(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", BACKENDS)
def test_the_last_layer_attends_from_the_last_token_of_a_prompt(name: str, build: Build) -> None:
    llm, backend = build(name)
    tokens(llm, [PROMPT], ONE_TOKEN)
    assert backend.taken() == [((40, 40), (1, 40))]


def test_a_chunk_that_ends_within_a_prompt_has_no_queries_in_the_last_layer(build: Build) -> None:
    llm, backend = build(long_prefill_token_threshold=16)
    tokens(llm, [PROMPT], ONE_TOKEN)
    assert backend.taken() == [((16, 16), (0, 16)), ((16, 16), (0, 16)), ((8, 8), (1, 8))]


def test_a_prefix_hit_attends_from_the_last_token_too(build: Build) -> None:
    llm, backend = build()
    for _ in range(2):
        tokens(llm, [PROMPT], ONE_TOKEN)
    assert backend.taken() == [((40, 40), (1, 40)), ((8, 8), (1, 8))]


def test_decode_steps_attend_from_every_token_and_build_nothing_more(build: Build) -> None:
    llm, backend = build()
    tokens(llm, [PROMPT], GREEDY)
    assert backend.taken()[1:] == [((1, 1), (1, 1))] * 5
    # two for the prompt, one for each other step
    assert backend.num_built == 2 + 5


def test_prompt_log_probabilities_want_every_token(build: Build) -> None:
    llm, backend = build()
    tokens(llm, [PROMPT], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    assert backend.taken() == [((40, 40), (40, 40))]


@pytest.mark.parametrize("layer", [1, -1])
def test_a_drafter_that_reads_the_last_layer_gets_every_token_of_it(
    layer: int, build: Build
) -> None:
    llm, backend = build(spec_decode=Reads(layer))
    tokens(llm, [PROMPT], ONE_TOKEN)
    assert backend.taken() == [((40, 40), (40, 40))]


def test_a_drafter_that_reads_another_layer_leaves_it_at_that(build: Build) -> None:
    llm, backend = build(spec_decode=Reads(0))
    tokens(llm, [PROMPT], ONE_TOKEN)
    assert backend.taken() == [((40, 40), (1, 40))]


@pytest.mark.parametrize("write", [write_eagle1, write_eagle3])
def test_a_draft_head_attends_from_the_entry_that_it_drafts_behind(
    write: Callable[[Path], Path], build: Build, tmp_path: Path
) -> None:
    llm, backend = build(spec_decode=drafter("eagle", write(tmp_path / "head")))
    tokens(llm, [PROMPT], GREEDY)
    # these heads read the target's last layer
    assert backend.taken()[:2] == [((40, 40), (40, 40)), ((1, 40),)]


def test_so_does_the_last_layer_of_a_draft_model(build: Build, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    llm, backend = build(spec_decode=drafter("draft_model", model))
    tokens(llm, [PROMPT], GREEDY)
    assert backend.taken()[:2] == [((40, 40), (1, 40)), ((41, 41), (1, 41))]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 24},
        {"spec_decode": {"name": "ngram", "options": {"min_ngram": 1}, "adaptive": False}},
    ],
    ids=["whole", "chunks", "small_batches", "drafts"],
)
def test_tokens_are_those_of_a_last_layer_that_attends_from_every_token(
    name: str, settings: dict[str, Any], build: Build
) -> None:
    prompts = [PROMPT, *OTHERS, [5, 6] * 12]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    (some, noting), (every, _) = (
        build(name, takes_fewer_queries=takes, **settings) for takes in (True, False)
    )
    for _ in range(2):  # the second time from the prefix cache
        assert tokens(some, prompts, params) == tokens(every, prompts, params)
    steps = noting.taken()
    assert any(last[0] < first[0] for first, last in steps)
    assert all(last[1] == first[1] for first, last in steps)
