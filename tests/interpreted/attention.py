"""Attention in Triton in the interpreter: the conformance suite, on fewer shapes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from hotshoe import LLM, SamplingParams
from hotshoe.api import Component
from hotshoe.testing.attention import SPECS, AttentionConformance
from hotshoe.testing.attention_reference import LayerFacts
from hotshoe.testing.forward import allocate_cache, make_batch
from hotshoe_attention import triton
from interpreted.one_batch import again, run_on_one_batch


class TestTritonAttention(AttentionConformance):
    spec_names: ClassVar = (
        "gqa-7",
        "softcap-window",
        "sinks-window",
        "float16",
        "float32-on-int8",
    )
    block_sizes: ClassVar = (4, 64)
    long_context: ClassVar = 200

    def component(self) -> Component:
        return triton.hotshoe_component()

    def test_what_was_prepared_once_serves_steps_of_other_lengths(self) -> None:
        run_on_one_batch(self.start(SPECS["gqa-3"], rotary_dim=64), again)


@pytest.mark.parametrize("name", ["k", "v"])
def test_int8_hides_nothing_that_is_no_number(name: str) -> None:
    spec = SPECS["float32-on-int8"]
    backend = TestTritonAttention().backend()
    cache = allocate_cache(backend, spec, 1, torch.device("cpu"))
    rows = {
        "q": torch.ones(3, spec.num_heads, spec.kv.head_dim),
        "k": torch.ones(3, spec.kv.num_kv_heads, spec.kv.head_dim),
        "v": torch.ones(3, spec.kv.num_kv_heads, spec.kv.head_dim_v),
    }
    rows[name][1, :, 3] = torch.nan
    batch = make_batch([3], [3], [[0]], 16)
    metadata = backend.build_metadata(batch, spec.kv)
    output = backend.forward(LayerFacts(spec), *rows.values(), cache, metadata)
    assert output[1:].isnan().all()


def test_greedy_text_is_that_of_the_reference(tiny_path: Path) -> None:
    assert answers(tiny_path, "triton") == answers(tiny_path, "torch_sdpa")


def answers(model: Path, attention: str) -> list[tuple[int, ...]]:
    """Greedy tokens after prompts of unequal lengths, which are computed in chunks."""
    prompts = [[7, 3, 200], [5] * 8 + list(range(30)), list(range(100, 117))]
    with LLM(
        str(model),
        device="cpu",
        dtype="float32",
        kernels="torch",
        attention=attention,
        sampler="standard",
        max_model_len=64,
        max_num_batched_tokens=32,
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        return [tuple(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy)]
