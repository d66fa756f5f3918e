"""Native models against transformers, run from the same folder of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hotshoe.testing.forward import DirectRunner, Parts
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe.weights.checkpoint import open_checkpoint
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
    with open_checkpoint(str(folder)) as checkpoint:
        return DirectRunner(checkpoint.config, checkpoint.tensors(), PARTS, **kwargs)


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


def test_captured_hidden_states_equal_transformers(folder: Path) -> None:
    model = reference(folder)
    num_layers = model.config.num_hidden_layers
    runner = load(folder)

    runner.step({"a": PROMPTS[0]}, captured_layers=frozenset([-1, *range(num_layers)]))

    with torch.inference_mode():
        output = model.model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert runner.hidden_states.keys() == {-1, *range(num_layers)}
    torch.testing.assert_close(
        runner.hidden_states[-1], output.last_hidden_state[0], atol=1e-4, rtol=0
    )
    # transformers has the embedding first, and the final norm in place of the last layer's output
    for i in range(num_layers - 1):
        torch.testing.assert_close(
            runner.hidden_states[i], output.hidden_states[i + 1][0], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny_checkpoint(tmp_path, tokenizer=False)
    expected = load(folder).step({"a": PROMPTS[0]})["a"]

    logits = load(folder, dtype=dtype).step({"a": PROMPTS[0]})["a"]

    assert logits.dtype == dtype
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    assert agreement > 0.8
    torch.testing.assert_close(logits.float(), expected, atol=0.25, rtol=0)
