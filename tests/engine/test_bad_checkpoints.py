"""What an engine says about a model whose files contradict themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hotshoe import LLM
from hotshoe.errors import ConfigError, ModelLoadError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoilt."""
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": 5}, "architectures in config.json is 5; allowed: a list of names"),
        ({"architectures": "Llama"}, "architectures in config.json is 'Llama'; allowed: a list"),
        ({"max_position_embeddings": "a"}, "max_position_embeddings in config.json is 'a'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings in config.json is 0"),
    ],
)
def test_a_config_field_of_the_wrong_kind_is_named(
    copy: Path, fields: dict[str, Any], message: str
) -> None:
    change_config(copy, **fields)
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(copy), max_model_len=64)


def test_a_config_without_a_length_needs_one_from_the_user(copy: Path) -> None:
    path = copy / "config.json"
    fields = json.loads(path.read_text())
    del fields["max_position_embeddings"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"doesn't say its maximal length; set model\.max_model"):
        LLM(str(copy))
    with LLM(str(copy), max_model_len=64) as llm:
        assert llm.generate("a")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_whole_numbers_are_not_taken_for_weights(copy: Path, name: str) -> None:
    change_weights(copy, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' holds int8, which are no weights"):
        LLM(str(copy), max_model_len=64)


def test_a_quantized_model_is_refused_by_its_method(copy: Path) -> None:
    change_config(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    name = "model.layers.0.mlp.down_proj"
    change_weights(copy, lambda tensors: tensors.update({f"{name}.qweight": torch.zeros(2, 2)}))
    with pytest.raises(ModelLoadError, match=r"down_proj\.qweight'; it is quantized by gptq"):
        LLM(str(copy), max_model_len=64)


def test_defaults_of_a_model_that_no_request_may_have_are_blamed_on_it(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"top_p": 0}))
    with LLM(str(copy), max_model_len=64) as llm:
        message = r"generation_config\.json: top_p: got 0.*model\.use_generation_config to false"
        with pytest.raises(ModelLoadError, match=message):
            llm.generate("a")
        assert llm.default_sampling_params(top_p=0.5).top_p == 0.5


def test_a_folder_without_a_tokenizer_says_what_it_lacks(copy: Path) -> None:
    for path in copy.glob("token*"):
        path.unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json.*set model\.tokenizer"):
        LLM(str(copy), max_model_len=64)
