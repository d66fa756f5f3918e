"""Native models against transformers, run from the same folder of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from hotshoe.testing.forward import DenseTensor, DirectRunner, Parts
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe_attention import torch_sdpa
from hotshoe_kernels import torch as torch_kernels
from hotshoe_models import llama
from hotshoe_quantization import none

PARTS = Parts(
    model=llama.hotshoe_component(),
    attention=torch_sdpa.hotshoe_component(),
    kernels=torch_kernels.hotshoe_component(),
    quantization=none.hotshoe_component(),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaForCausalLM", {"head_dim": 24}),
    "llama-no-gqa": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-llama3-rope": ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", {"rope_scaling": YARN}),
    "llama-linear-rope": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-no-layers": ("LlamaForCausalLM", {"num_hidden_layers": 0}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-sliding": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-biases": (
        "Qwen3ForCausalLM",
        {"attention_bias": True, "tie_word_embeddings": True},
    ),
}
PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (37, 5, 64)
]


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = CASES[request.param]
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp(request.param),
        tiny_llama_config(**overrides),
        architecture=architecture,
        tokenizer=False,
    )


def load(folder: Path, **kwargs: Any) -> DirectRunner:
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = [DenseTensor(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
    return DirectRunner(config, tensors, PARTS, **kwargs)


def reference(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0]


def test_logits_equal_transformers_for_a_ragged_batch(folder: Path) -> None:
    model = reference(folder)
    runner = load(folder)

    logits = runner.step({str(i): prompt for i, prompt in enumerate(PROMPTS)})

    assert runner.unused == []
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(
            logits[str(i)], reference_logits(model, prompt), atol=1e-4, rtol=0
        )


def test_greedy_tokens_equal_transformers_generate(folder: Path) -> None:
    model = reference(folder)
    prompt = PROMPTS[0]
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None
    )[0, len(prompt) :].tolist()

    output = load(folder).greedy(prompt, 24, request_id="a")

    assert output == expected
    assert len(set(output)) > 4  # or the comparison would say little


def test_chunks_and_mixed_batches_give_the_same_logits(folder: Path) -> None:
    whole = load(folder).step({str(i): prompt for i, prompt in enumerate(PROMPTS)})
    runner = load(folder, block_size=4)
    a, b, c = PROMPTS

    steps = [
        runner.step({"0": a[:20]}),
        runner.step({"2": c[:1], "0": a[20:21], "1": b}),
        runner.step({"0": a[21:36], "2": c[1:2]}),
        runner.step({"2": c[2:], "0": a[36:]}),
    ]

    for request_id in whole:
        pieces = [step[request_id] for step in steps if request_id in step]
        torch.testing.assert_close(torch.cat(pieces), whole[request_id], atol=1e-4, rtol=0)
