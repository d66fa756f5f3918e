"""Models whose weights are drawn: a config.json is enough to run one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from drafts.heads import write_eagle1, write_eagle3
from hotshoe import LLM, SamplingParams
from hotshoe.api import StructuredOutputs
from hotshoe.config import EngineConfig
from hotshoe.engine.resolution import Resolver
from hotshoe.engine.skeleton import build_skeleton, facts_of
from hotshoe.errors import HotshoeError, ModelLoadError, RequestError
from hotshoe.plugins import PluginRegistry
from hotshoe.testing.models import (
    IM_END,
    TINY_VOCAB_SIZE,
    tiny_llama_config,
    write_byte_tokenizer,
    write_tiny_checkpoint,
)
from hotshoe.text.tokenizer import load_tokenizer
from hotshoe.weights.checkpoint import open_checkpoint
from hotshoe.weights.loader import stored_bytes

PROMPTS = [[1, 2, 3, 4, 5], [200, 100]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nothing but a config."""
    return write_config(tmp_path)


def write_config(folder: Path, name: str = "config.json", **overrides: Any) -> Path:
    config = tiny_llama_config(architectures=["LlamaForCausalLM"], **overrides)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder


def random_llm(path: Path, **arguments: Any) -> LLM:
    return LLM({"path": str(path), "weights": "random"}, max_model_len=256, **arguments)


def tokens_of(llm: LLM) -> list[list[int]]:
    with llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


def test_config_is_enough_and_brings_the_same_tokens_again(tmp_path: Path) -> None:
    first = tokens_of(random_llm(write_config(tmp_path / "one")))
    write_config(tmp_path, "shape.json")
    assert tokens_of(random_llm(tmp_path / "shape.json")) == first
    # they follow the prompt, and the model doesn't repeat itself from the start
    assert first[0] != first[1]
    assert all(len(set(one)) > 3 for one in first)
    other = tokens_of(random_llm(write_config(tmp_path / "other", intermediate_size=192)))
    assert other != first


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": True},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"attention_bias": True, "torch_dtype": "bfloat16"},
    ],
    ids=["tied", "head norms", "biases"],
)
def test_every_kind_of_layer_gets_its_weights(tmp_path: Path, config: dict[str, Any]) -> None:
    written = tiny_llama_config(architectures=["LlamaForCausalLM"]) | config
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert [len(one) for one in tokens_of(random_llm(tmp_path))] == [12, 12]


def test_quantization_applies(folder: Path) -> None:
    llm = random_llm(folder, quantization="int8")
    assert llm.components["quantization"].startswith("int8")
    quantized = tokens_of(llm)
    dense = tokens_of(random_llm(folder))
    # rounding to 8 bits changes few tokens, and some
    assert [one[0] for one in quantized] == [one[0] for one in dense]
    with pytest.raises(HotshoeError, match=r"blocks of a GGUF file, but its weights are drawn"):
        random_llm(folder, quantization="gguf")


def test_values_are_spread_as_the_widths_want(folder: Path) -> None:
    llm = random_llm(folder)
    with llm:
        entry = llm.generate([PROMPTS[0]], GREEDY)[0]
        scored = llm.generate(
            [PROMPTS[0]], SamplingParams(max_tokens=1, logprobs=TINY_VOCAB_SIZE, detokenize=False)
        )[0]
    assert entry.outputs[0].logprobs is None
    position = (scored.outputs[0].logprobs or [])[0]
    logits = torch.tensor([one.logprob for one in position.top])
    assert 0.5 < float(logits.std()) < 2
    assert {one.decoded for one in position.top} == {None}


def test_checkpoint_beside_the_config_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match="can't read safetensors"):
        LLM(str(folder))
    assert len(tokens_of(random_llm(folder))[0]) == 12


def test_dtype_is_that_of_the_config(tmp_path: Path) -> None:
    def dtype_of(**fields: Any) -> str:
        path = str(write_config(tmp_path / "m", **fields))
        with open_checkpoint(path, reads_weights=False) as checkpoint:
            assert checkpoint.format == "random"
            assert (list(checkpoint.tensors()), checkpoint.num_bytes) == ([], 0)
            return checkpoint.dtype

    assert dtype_of(torch_dtype="bfloat16") == "bfloat16"
    assert dtype_of(torch_dtype="bfloat16", dtype="float16") == "float16"
    assert dtype_of(torch_dtype=None) == "float32"
    with pytest.raises(ModelLoadError, match=r"torch_dtype in config\.json is 'int3'; allowed"):
        dtype_of(torch_dtype="int3")


def test_tokenizer_is_used_where_there_is_one(folder: Path, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path / "tokenizer")
    with random_llm(folder, tokenizer=str(tmp_path / "tokenizer")) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=4))[0].prompt_token_ids == [
            *b"Hello"
        ]
    write_byte_tokenizer(folder)
    with random_llm(folder) as llm:
        assert llm.tokenizer.decode([72, 105], skip_special_tokens=True) == "Hi"


def test_without_a_tokenizer_ids_go_in_and_out(folder: Path) -> None:
    with random_llm(folder) as llm:
        output = llm.generate([PROMPTS[0]])[0]  # the defaults ask for no text
        assert output.outputs[0].token_ids
        assert output.text == ""
        assert llm.tokenizer.eos_token_ids == (IM_END,)
        biased = SamplingParams(logit_bias={IM_END: 100.0}, detokenize=False)
        assert llm.generate([PROMPTS[0]], biased)[0].outputs[0].finish_reason == "stop"


def test_what_takes_a_tokenizer_is_refused_without_one(folder: Path) -> None:
    remedy = "set model.tokenizer to a folder, GGUF file or hub id that has one"
    ids = PROMPTS[0]
    with random_llm(folder) as llm:
        with pytest.raises(RequestError, match=f"no tokenizer.* send token ids, or {remedy}"):
            llm.generate("Hello")
        with pytest.raises(RequestError, match=f"no text; set detokenize to false, or {remedy}"):
            llm.generate([ids], SamplingParams())
        with pytest.raises(RequestError, match=f"conversations .* or {remedy}"):
            llm.chat([{"role": "user", "content": "Hello"}])
        with pytest.raises(RequestError, match=f"texts can't be encoded.* {remedy}"):
            llm.generate([ids], SamplingParams(bad_words=["no"], detokenize=False))
        constrained = SamplingParams(
            structured_outputs=StructuredOutputs(regex="a+"), detokenize=False
        )
        with pytest.raises(RequestError, match=f"structured_outputs can't be had; {remedy}"):
            llm.generate([ids], constrained)
        assert llm.generate([ids], GREEDY)[0].finished
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json; add it, or set model\.tokeniz"):
        load_tokenizer(open_checkpoint(str(folder), reads_weights=False))


def test_a_drafter_brings_its_own_weights_or_is_refused(folder: Path, tmp_path: Path) -> None:
    def drafting(head: Path) -> LLM:
        spec_decode = {"name": "eagle", "options": {"model": str(head), "num_draft_tokens": 2}}
        return random_llm(folder, spec_decode=spec_decode | {"adaptive": False})

    expected = tokens_of(random_llm(folder))
    assert tokens_of(drafting(write_eagle1(tmp_path / "eagle1"))) == expected
    with pytest.raises(ModelLoadError, match=r"model\.weights is 'random'; use a drafter that"):
        drafting(write_eagle3(tmp_path / "eagle3"))


def test_no_weights_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with open_checkpoint("owner/name", reads_weights=False) as checkpoint:
        assert checkpoint.config["hidden_size"] == 64
    assert len(asked) == 1
    assert not any("safetensors" in one or "bin" in one for one in asked[0])


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no '.*config\.json'"):
        random_llm(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        random_llm(tmp_path / "shape.json")


def test_embedded_model_lends_its_shape_and_tokenizer() -> None:
    with open_checkpoint("embedded", reads_weights=False) as checkpoint:
        assert (checkpoint.format, checkpoint.dtype) == ("random", "bfloat16")
        assert checkpoint.config["hidden_size"] == 576
        assert load_tokenizer(checkpoint).encode("Hello")


def test_size_is_known_before_anything_is_drawn(tmp_path: Path) -> None:
    written = write_tiny_checkpoint(tmp_path, tiny_llama_config(tie_word_embeddings=True))
    resolver = Resolver(EngineConfig(), PluginRegistry(), {})
    sizes = []
    for reads_weights in (True, False):
        with open_checkpoint(str(written), reads_weights=reads_weights) as checkpoint:
            facts = facts_of(resolver.config, checkpoint)
            skeleton = build_skeleton(resolver, checkpoint, facts)
            sizes.append(stored_bytes(skeleton.layers, checkpoint))
    # the layers of a tied model await its embedding once
    assert sizes[0] == sizes[1] > 0
