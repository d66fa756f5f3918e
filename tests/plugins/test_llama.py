"""What the Llama family plugin refuses, and how it takes tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotshoe.errors import ModelLoadError
from hotshoe.testing.forward import DenseTensor, DirectRunner, Parts
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe.weights.checkpoint import open_checkpoint
from hotshoe_attention import torch_sdpa
from hotshoe_kernels import torch as torch_kernels
from hotshoe_models import llama
from hotshoe_models.llama.config import LlamaConfig
from hotshoe_quantization import none

PARTS = Parts(
    model=llama.hotshoe_component(),
    attention=torch_sdpa.hotshoe_component(),
    kernels=torch_kernels.hotshoe_component(),
    quantization=none.hotshoe_component(),
)


def parse(architecture: str = "LlamaForCausalLM", **overrides: Any) -> LlamaConfig:
    return LlamaConfig.parse({**tiny_llama_config(**overrides), "architectures": [architecture]})


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=False)
    with open_checkpoint(str(folder)) as checkpoint:
        return {tensor.name: tensor.to_dense(torch.float32) for tensor in checkpoint.tensors()}


def load(tensors: dict[str, torch.Tensor], **overrides: Any) -> DirectRunner:
    config = {**tiny_llama_config(**overrides), "architectures": ["LlamaForCausalLM"]}
    return DirectRunner(config, [DenseTensor(*item) for item in tensors.items()], PARTS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported .* allowed: 'silu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            r"partial_rotary_factor 0\.25 is not supported",
        ),
        ({"hidden_size": None}, "field 'hidden_size' must be an integer, got None"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse(**overrides)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"'BloomForCausalLM' is not of the Llama family"):
        parse("BloomForCausalLM")


def test_layer_types_must_fit_the_layers() -> None:
    with pytest.raises(ModelLoadError, match="layer_types must name"):
        parse("Qwen2ForCausalLM", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ModelLoadError, match="each of 2 layers"):
        parse("Qwen3ForCausalLM", layer_types=["full_attention"])


def test_layer_types_decide_which_layers_have_a_window() -> None:
    types = ["sliding_attention", "full_attention"]
    config = parse("Qwen3ForCausalLM", layer_types=types, use_sliding_window=True, sliding_window=7)
    assert config.sliding_windows == (7, None)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"],
)
def test_omitted_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    import transformers

    fields = {
        "vocab_size": 300,
        "hidden_size": 4096,
        "intermediate_size": 128,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
    }
    expected = getattr(transformers, architecture).config_class(**fields)

    config = LlamaConfig.parse({**fields, "architectures": [architecture]})

    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == (getattr(expected, "head_dim", None) or 4096 // 32)
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    window = getattr(expected, "sliding_window", None)
    assert config.sliding_windows == (window,) * 30


def test_fields_that_an_architecture_ignores_are_ignored() -> None:
    assert parse("LlamaForCausalLM", sliding_window=5).sliding_windows == (None, None)
    assert not parse("MistralForCausalLM", attention_bias=True).qkv_bias
    assert not parse("Qwen2ForCausalLM", mlp_bias=True).mlp_bias


@pytest.mark.parametrize("rows", [[], [3], [6], [2, 3, 6], [0, 1, 2, 3, 5, 6]], ids=str)
def test_the_last_layer_computes_no_more_rows_than_are_wanted(
    tensors: dict[str, torch.Tensor], rows: list[int]
) -> None:
    runner = load(tensors)
    first, second = [5, 9, 2, 40], [7, 7, 1]
    every = runner.forward({"a": first, "b": second})
    some = runner.forward({"c": first, "d": second}, wanted_rows=rows)
    torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-6)
    # the keys and values of all tokens are there
    torch.testing.assert_close(
        runner.forward({"d": [3], "c": [8]}), runner.forward({"b": [3], "a": [8]})
    )


@pytest.mark.parametrize("layer", [1, -1])
def test_a_drafter_gets_all_rows_of_the_last_layer(
    tensors: dict[str, torch.Tensor], layer: int
) -> None:
    runner = load(tensors)
    every = runner.forward({"a": [5, 9, 2]}, captured_layers=frozenset((layer,)))
    expected = runner.hidden_states[layer]
    captured = runner.forward(
        {"b": [5, 9, 2]}, captured_layers=frozenset((layer,)), wanted_rows=[2]
    )
    assert torch.equal(captured, every)
    assert torch.equal(runner.hidden_states[layer], expected)


def test_missing_tensor_is_named(tensors: dict[str, torch.Tensor]) -> None:
    without = {k: v for k, v in tensors.items() if k != "model.layers.1.self_attn.k_proj.weight"}
    with pytest.raises(ModelLoadError, match=r"\['k_proj'\] of 'model.layers.1.self_attn.qkv_proj"):
        load(without)


def test_tensor_of_another_shape_is_named(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ModelLoadError, match=rf"'{name}' has shape \(3, 3\), but 'up_proj'"):
        load({**tensors, name: torch.zeros(3, 3)})


def test_unknown_tensors_are_left_to_the_loader(tensors: dict[str, torch.Tensor]) -> None:
    runner = load({**tensors, "model.layers.9.odd.weight": torch.zeros(1)})
    assert runner.unused == ["model.layers.9.odd.weight"]


@pytest.mark.parametrize("order", [1, -1])
def test_tied_head_in_the_checkpoint_is_accepted_when_equal(
    tensors: dict[str, torch.Tensor], order: int
) -> None:
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    runner = load(dict(list(tied.items())[::order]), tie_word_embeddings=True)

    assert runner.unused == []
    table = tensors["model.embed_tokens.weight"]
    assert torch.equal(runner.model.compute_logits(torch.eye(64)), table.T)


@pytest.mark.parametrize("order", [1, -1])
def test_tied_head_that_differs_is_refused(tensors: dict[str, torch.Tensor], order: int) -> None:
    with pytest.raises(ModelLoadError, match=r"tie_word_embeddings is true, but .* differ"):
        load(dict(list(tensors.items())[::order]), tie_word_embeddings=True)
