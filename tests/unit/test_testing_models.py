"""The tiny checkpoints and the scripted model that other tests stand on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hotshoe.testing import scripted_model
from hotshoe.testing.forward import DirectRunner, Parts
from hotshoe.testing.models import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    TINY_VOCAB_SIZE,
    tiny_llama_config,
    write_tiny_checkpoint,
)
from hotshoe.testing.scripted_model import write_scripted_checkpoint
from hotshoe.weights.checkpoint import open_checkpoint
from hotshoe_attention import torch_sdpa
from hotshoe_kernels import torch as torch_kernels
from hotshoe_quantization import none

PARTS = Parts(
    model=scripted_model.hotshoe_component(),
    attention=torch_sdpa.hotshoe_component(),
    kernels=torch_kernels.hotshoe_component(),
    quantization=none.hotshoe_component(),
)


def run_scripted(folder: Path) -> DirectRunner:
    with open_checkpoint(str(folder)) as checkpoint:
        return DirectRunner(checkpoint.config, checkpoint.tensors(), PARTS, block_size=4)


def test_scripted_requests_say_their_scripts_whatever_the_batch(tmp_path: Path) -> None:
    scripts = [[10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26], [7]]
    runner = run_scripted(write_scripted_checkpoint(tmp_path, scripts))

    steps = [
        runner.step({"a": [3, 100], "b": [4]}),
        runner.step({"b": [21, 22, 23], "a": [12], "c": [5, 0]}),
        runner.step({"a": [13], "c": [7], "b": [9]}),
    ]

    said = [{name: rows[-1].argmax().item() for name, rows in step.items()} for step in steps]
    assert said == [{"a": 11, "b": 20}, {"b": 23, "a": 12, "c": 7}, {"a": 13, "c": 7, "b": 24}]


def test_scripted_logits_come_out_as_given_and_the_last_entry_holds(tmp_path: Path) -> None:
    logits = torch.randn(2, 3, 5)
    runner = run_scripted(write_scripted_checkpoint(tmp_path, logits, tokenizer=False))

    output = runner.step({"a": [1, 0, 0, 0, 0]})["a"]

    torch.testing.assert_close(output, logits[1, [0, 1, 2, 2, 2]], atol=0, rtol=0)


def test_too_many_scripts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 to 256 scripts, got 300"):
        write_scripted_checkpoint(tmp_path, [[1]] * 300)


def test_byte_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_checkpoint(tmp_path))
    text = "naïve  日本\n\t🙂 12 tokens"

    token_ids = tokenizer.encode(text)

    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text
    special = "<|endoftext|><|im_start|><|im_end|>"
    assert tokenizer.encode(special) == [END_OF_TEXT, IM_START, IM_END]
    assert len(tokenizer) == TINY_VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (END_OF_TEXT, IM_END)


def test_chat_template_is_chatml(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_checkpoint(tmp_path))

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )

    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_shards_hold_the_same_weights_as_one_file(tmp_path: Path) -> None:
    folders = [write_tiny_checkpoint(tmp_path / str(n), shards=n, seed=5) for n in (1, 3)]

    weights = []
    for folder in folders:
        with open_checkpoint(str(folder)) as checkpoint:
            weights.append({t.name: t.to_dense(torch.float32) for t in checkpoint.tensors()})

    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(list(folders[1].glob("*.safetensors"))) == 3


def test_seed_and_overrides_change_the_checkpoint(tmp_path: Path) -> None:
    config = tiny_llama_config(num_hidden_layers=1, tie_word_embeddings=True)
    folder = write_tiny_checkpoint(tmp_path / "a", config, seed=1, tokenizer=False)
    other = write_tiny_checkpoint(tmp_path / "b", config, seed=2, tokenizer=False)

    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert not (folder / "tokenizer.json").exists()
    with open_checkpoint(str(folder)) as a, open_checkpoint(str(other)) as b:
        names = [tensor.name for tensor in a.tensors()]
        assert "lm_head.weight" not in names
        assert not any("layers.1." in name for name in names)
        first, second = next(iter(a.tensors())), next(iter(b.tensors()))
        assert not torch.equal(first.to_dense(torch.float32), second.to_dense(torch.float32))
