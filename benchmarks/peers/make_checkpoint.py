"""Write a model that hotshoe reads as a Hugging Face folder that every other engine reads.

    python benchmarks/peers/make_checkpoint.py MODEL FOLDER

``config.json``, bfloat16 ``model.safetensors``, tokenizer and chat template. Blocks of a GGUF file
are dequantized, so that all engines start from the same values.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hotshoe.text.tokenizer import load_tokenizer
from hotshoe.weights.checkpoint import Checkpoint, open_checkpoint


def write_checkpoint(model: str, folder: Path) -> None:
    """Convert ``model`` (as ``hotshoe`` takes it) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        config = _config(checkpoint)
        weights = {tensor.name: tensor.to_dense(torch.bfloat16) for tensor in checkpoint.tensors()}
        generation = dict(checkpoint.generation_config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.hf.save_pretrained(folder)
    if tokenizer.chat_template is not None:
        _put_template_inline(folder, tokenizer.chat_template)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's own, with what its reader may have left to defaults."""
    config = dict(checkpoint.config)
    config["torch_dtype"] = "bfloat16"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        if isinstance(value, list):
            config[key] = value[0]
    # readers differ in where they look for the rotary base: newer ones in rope_parameters only
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        config["rope_theta"] = theta
    return config


def _put_template_inline(folder: Path, template: str) -> None:
    """For readers that don't know ``chat_template.jinja``."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = template
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Convert, unless the folder is there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if (arguments.folder / "model.safetensors").exists():
        print(f"{arguments.folder} exists already")
        return
    write_checkpoint(arguments.model, arguments.folder)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
