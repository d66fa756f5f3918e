import json
from pathlib import Path
from typing import Any

import hotshoe_flash_attn
import pytest
import torch
from hotshoe_flash_attn import CAPABILITIES, FlashAttnOptions
from hotshoe_flash_attn.backend import FlashAttnBackend

from hotshoe import LLM, SamplingParams
from hotshoe.api import AttentionContext, Component
from hotshoe.errors import ConfigError
from hotshoe.testing.attention import SPECS, AttentionConformance, make_spec
from hotshoe.testing.models import tiny_llama_config


class TestFlashAttn(AttentionConformance):
    """What hotshoe relies on, in the dtypes that the library has."""

    device = "cuda" if torch.cuda.is_available() else "cpu"
    block_sizes = (256,) if torch.cuda.is_available() else (4, 16)
    long_context = 300

    def component(self) -> Component:
        return hotshoe_flash_attn.hotshoe_component()

    def options(self) -> dict[str, Any]:
        return {"page_multiple": 256 if torch.cuda.is_available() else 1}

    @pytest.mark.parametrize("name", ["mha", "gqa-7", "head-128", "softcap-window", "window-1"])
    def test_what_the_suite_tries_in_float32(self, name: str) -> None:
        kv = SPECS[name].kv
        spec = make_spec(
            SPECS[name].num_heads,
            kv.num_kv_heads,
            kv.head_dim,
            dtype="bfloat16",
            sliding_window=kv.sliding_window,
            softcap=SPECS[name].softcap,
        )
        run = self.start(spec)
        run.step({"a": 10, "b": 40})
        run.fork("a", "c", 0)
        run.step({"a": 1, "b": 1, "c": 3})
        run.truncate("b", 20)
        run.step({"a": 1, "b": 1, "c": 1})


def backend(block_size: int = 256, page_multiple: int = 256) -> FlashAttnBackend:
    context = AttentionContext(
        device=torch.device("cpu"),
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
    )
    return FlashAttnBackend(CAPABILITIES, context, page_multiple=page_multiple)


def test_what_the_library_lacks_is_refused_with_a_reason() -> None:
    plain = make_spec(dtype="bfloat16")
    assert backend().supports(plain) == []
    assert backend(16).supports(plain) == ["cache.block_size 16 is no multiple of 256"]
    assert "float32 on float32 pages" in backend().supports(make_spec())[0]
    narrow = make_spec(dtype="bfloat16", kv_dtype="float16")
    assert "one dtype for both" in backend().supports(narrow)[0]
    assert backend().supports(make_spec(dtype="bfloat16", has_sinks=True)) == ["sinks"]
    uneven = make_spec(dtype="bfloat16", head_dim=96, head_dim_v=64)
    assert "they must be equal" in backend().supports(uneven)[0]


def test_the_options_default_to_what_is_released() -> None:
    assert FlashAttnOptions().page_multiple == 256


def test_an_engine_runs_on_it_as_on_the_reference(tmp_path: Path) -> None:
    config = tiny_llama_config(architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"path": str(tmp_path), "weights": "random"}
    prompts = [[5, 6, 7, 8] * 5, [9, 10]]
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=1, detokenize=False)

    def logprobs(attention: Any) -> list[float]:
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "kernels": "torch",
            "cache": {"block_size": 16, "num_blocks": 16},
            "max_model_len": 128,
            "device": "cpu",
        }
        with LLM(model, attention=attention, **settings) as llm:
            outputs = llm.generate(prompts, greedy)
        return [one.outputs[0].logprobs[0].token.logprob for one in outputs]

    assert logprobs(backend(16, 1)) == pytest.approx(logprobs("torch_sdpa"), abs=0.05)
    with pytest.raises(ConfigError, match="block_size 16 is no multiple of 256"):
        logprobs(backend(16))
