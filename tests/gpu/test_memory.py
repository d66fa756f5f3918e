"""How much of the GPU an engine takes, and what it says when that isn't enough. Some fill it, so
nothing else may run on it meanwhile.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from gpu.workload import PROMPTS, OpenLLM
from hotshoe import LLM, SamplingParams
from hotshoe.errors import HotshoeError
from hotshoe.testing.models import tiny_llama_config


def free_memory() -> None:
    """Give back what errors and closed engines have left."""
    gc.collect()
    torch.cuda.empty_cache()


def test_a_share_that_is_too_small_names_the_setting(open_llm: OpenLLM) -> None:
    with pytest.raises(HotshoeError, match=r"cache\.gpu_memory_utilization 1e-06 leaves"):
        open_llm(cache={"gpu_memory_utilization": 1e-6})


def test_more_pages_than_the_gpu_holds_name_the_setting(open_llm: OpenLLM) -> None:
    total_gib = torch.cuda.mem_get_info()[1] / 2**30
    with pytest.raises(HotshoeError, match=r"lower cache\.|cache\.memory_gb") as caught:
        open_llm(cache={"memory_gb": 3 * total_gib})
    assert "GiB" in str(caught.value)


def test_weights_that_dont_fit_name_what_to_do(tmp_path: Path) -> None:
    total_bytes = torch.cuda.mem_get_info()[1]
    hidden = 8192
    config = tiny_llama_config(
        architectures=["LlamaForCausalLM"],
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2 + total_bytes // (2 * 16 * hidden * hidden),
        head_dim=128,
        num_attention_heads=64,
        num_key_value_heads=64,
        torch_dtype="bfloat16",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HotshoeError, match=r"the weights \([0-9.]+ GiB as they are stored\)"):
        LLM({"path": str(tmp_path), "weights": "random"}, device="cuda", max_model_len=128)
    free_memory()
    assert torch.cuda.mem_get_info()[0] > 0.5 * total_bytes


def test_a_closed_engine_gives_its_memory_back(open_llm: OpenLLM) -> None:
    params = SamplingParams(max_tokens=4)
    with open_llm() as llm:
        llm.generate(PROMPTS[:4], params)
    free_memory()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        with open_llm(cache={"memory_gb": 1.0}) as llm:
            llm.generate(PROMPTS[:4], params)
        del llm
    free_memory()
    assert before - torch.cuda.mem_get_info()[0] < 2**28


def test_the_share_is_kept(open_llm: OpenLLM) -> None:
    free_before, total_bytes = torch.cuda.mem_get_info()
    used_before = total_bytes - free_before
    share = used_before / total_bytes + 0.1
    with open_llm(cache={"gpu_memory_utilization": share}) as llm:
        llm.generate(PROMPTS[:16], SamplingParams(max_tokens=8))
        free_bytes = torch.cuda.mem_get_info()[0]
    assert total_bytes - free_bytes < (share + 0.05) * total_bytes
