"""Whole steps on a GPU that isn't there, and that nobody may wait for."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.bucket_parts import BucketKernels, PaddedAttention
from hotshoe import LLM, SamplingParams
from hotshoe.api import AttentionBatch, AttentionContext, KVCacheSpec, LayerCache
from hotshoe.engine.skeleton import facts_of
from hotshoe.kv_cache.sizing import MemoryUse
from hotshoe.testing.no_syncs import PretendGpu, PretendStreams

NUMBERS = random.Random(5)
PROMPTS = [[NUMBERS.randrange(256) for _ in range(length)] for length in (3, 17, 1, 40, 30, 9)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=20, top_k=9, top_p=0.9),
    SamplingParams(temperature=1, seed=2, max_tokens=5, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=4, max_tokens=15, min_p=0.02, logit_bias={3: 2.0}),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=5, repetition_penalty=1.2),
]


class Attention(PaddedAttention):
    """May wait: what is looked at is everything else."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__(
            AttentionContext(
                device=gpu.device,
                block_size=16,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=256,
            )
        )
        self._gpu = gpu

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Any:
        with self._gpu.waiting():
            return super().build_metadata(batch, group)

    def forward(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: Any
    ) -> Tensor:
        with self._gpu.waiting():
            return super().forward(layer, q, k, v, cache, metadata)


class Memory:
    """Of the GPU: plenty."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> MemoryUse:
        return MemoryUse(2**40, 0)

    def watch(self) -> None:
        """Nothing to do."""

    def peak(self) -> MemoryUse:
        return MemoryUse(2**40, 2**20)


def settings() -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "sampler": "standard",
    }


def outputs(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)]


def test_steps_are_launched_and_finished_without_waiting_for_the_gpu(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_path), kernels="torch", attention="torch_sdpa", **settings()) as llm:
        expected = outputs(llm)
    gpu, kernels = PretendGpu(), BucketKernels()
    monkeypatch.setattr(
        "hotshoe.engine.assemble.facts_of",
        lambda *arguments: replace(facts_of(*arguments), device=gpu.device),
    )
    monkeypatch.setattr("hotshoe.worker.streams.CudaStreams", lambda _: PretendStreams(gpu))
    monkeypatch.setattr("hotshoe.engine.assemble.CudaMemory", Memory)
    with gpu, gpu.waiting():
        llm = LLM(
            str(tiny_path),
            kernels=kernels,
            attention=Attention(gpu),
            **settings(),
        )
    with gpu:
        assert llm.engine.executor.max_in_flight == 2
        found = outputs(llm)
        assert found == expected
        assert kernels.num_replays > 10
        llm.close()
