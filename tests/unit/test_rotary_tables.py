"""Rotary tables equal those of transformers for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotshoe.api.layers import rotary_tables
from hotshoe.errors import ModelLoadError

CPU = torch.device("cpu")
NUM_POSITIONS = 300
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, old spelling": {"type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        **LONG,
    },
}


def fields(scaling: dict[str, Any], **others: Any) -> dict[str, Any]:
    config = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 500.0,
        **others,
    }
    return config | ({"rope_scaling": scaling} if scaling else {})


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str) -> None:
    config = fields(SCALINGS[name])

    cos, sin = rotary_tables(config, rotary_dim=16, max_positions=NUM_POSITIONS, device=CPU)

    positions = torch.arange(NUM_POSITIONS)[None]
    reference = LlamaRotaryEmbedding(LlamaConfig(**config))
    expected_cos, expected_sin = reference(torch.zeros(1), positions)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, expected_cos[0, :, :8], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, :8], atol=1e-6, rtol=0)


def test_newer_spelling_of_the_parameters_gives_the_same_tables() -> None:
    old = fields(SCALINGS["llama3"])
    new = fields({}, rope_theta=None, rope_parameters={**SCALINGS["llama3"], "rope_theta": 500.0})

    tables = [
        rotary_tables(config, rotary_dim=16, max_positions=100, device=CPU) for config in (old, new)
    ]

    torch.testing.assert_close(tables[0], tables[1], atol=0, rtol=0)


@pytest.mark.parametrize("name", ["none", "yarn", "linear"])
def test_partial_rotation_is_a_matter_of_rotary_dim_alone(name: str) -> None:
    whole = fields(SCALINGS[name], head_dim=8)
    scaling = {**SCALINGS[name], "partial_rotary_factor": 0.5} if SCALINGS[name] else {}
    partial = fields(scaling, partial_rotary_factor=0.5)

    tables = [
        rotary_tables(config, rotary_dim=8, max_positions=100, device=CPU)
        for config in (whole, partial)
    ]

    torch.testing.assert_close(tables[0], tables[1], atol=0, rtol=0)


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"rope type 'spiral' is not supported; known: .*yarn"):
        rotary_tables(fields({"type": "spiral"}), rotary_dim=16, max_positions=8, device=CPU)


def test_missing_parameter_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"don't suit rope type 'linear': .*factor"):
        rotary_tables(fields({"type": "linear"}), rotary_dim=16, max_positions=8, device=CPU)


def test_parameters_by_layer_type_are_refused() -> None:
    config = fields({"full_attention": {"rope_type": "default"}})
    with pytest.raises(ModelLoadError, match="by layer type are not supported"):
        rotary_tables(config, rotary_dim=16, max_positions=8, device=CPU)
