"""The other kinds of plugins, from a scratch package: models, kernels, quantization, executors,
eviction policies and logits processors do what they are selected for.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hotshoe import LLM, SamplingParams
from hotshoe.api import ConfigError, KernelsCapabilities, ModelLoadError, RequestError, hookimpl
from hotshoe.testing.models import (
    IM_END,
    TINY_VOCAB_SIZE,
    tiny_llama_config,
    write_byte_tokenizer,
    write_tiny_checkpoint,
)

OpenLLM = Callable[..., LLM]
Acme = Callable[[str], Any]

PROMPTS = ["the first prompt", "another one", "and a third"]
SMALL_STEPS = {"scheduler": {"max_num_batched_tokens": 7}, "cache": {"block_size": 4}}


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def token_ids(llm: LLM, prompts: Any = PROMPTS, params: Any = None) -> list[list[int]]:
    outputs = llm.generate(prompts, params or greedy())
    return [list(output.outputs[0].token_ids) for output in outputs]


# -- models -------------------------------------------------------------------------------------


def write_toy_checkpoint(path: Path, architecture: str) -> dict[str, torch.Tensor]:
    """A folder in the format of the scratch model; returns its tensors."""
    hidden_size, shapes = 24, {}
    shapes["embed"] = shapes["head"] = (TINY_VOCAB_SIZE, hidden_size)
    if architecture == "AcmeToyForCausalLM":
        shapes |= {"q": (32, hidden_size), "k": (16, hidden_size), "v": (16, hidden_size)}
        shapes |= {"out": (hidden_size, 32), "norm": (hidden_size,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    config = {
        "architectures": [architecture],
        "hidden_size": hidden_size,
        "vocab_size": TINY_VOCAB_SIZE,
        "max_position_embeddings": 128,
        "eos_token_id": IM_END,
        "torch_dtype": "float32",
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    write_byte_tokenizer(path)
    return tensors


def toy_logits(tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """What the scratch model computes, over a whole text at once."""
    x = tensors["embed"][ids]
    if "q" in tensors:
        q, k, v = ((x @ tensors[name].T).unflatten(1, (-1, 16)) for name in "qkv")
        scores = torch.einsum("inh,jh->nij", q, k[:, 0]) / 4
        is_later = torch.ones(len(ids), len(ids)).triu(1).bool()
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        x = x + torch.einsum("nij,jh->inh", weights, v[:, 0]).flatten(1) @ tensors["out"].T
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], tensors["norm"], 1e-6)
    return x[-1] @ tensors["head"].T


@pytest.mark.parametrize("architecture", ["AcmeToyForCausalLM", "AcmeBigramForCausalLM"])
def test_model_from_a_scratch_package_computes_what_it_says(
    open_llm: OpenLLM, tmp_path: Path, architecture: str
) -> None:
    tensors = write_toy_checkpoint(tmp_path / "toy", architecture)
    model = {"path": str(tmp_path / "toy"), "name": "toy"}
    llm = open_llm(model=model, **SMALL_STEPS)
    assert llm.components["model"] == "toy (acme-plugins 3.1)"
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt.encode())
        for _ in range(12):
            ids.append(int(toy_logits(tensors, ids).argmax()))
        expected.append(ids[len(prompt) :])
    assert token_ids(llm) == expected
    assert token_ids(llm) == expected, "with every prefix cached"


def test_auto_names_the_model_plugins_that_have_to_be_asked_for(
    open_llm: OpenLLM, tmp_path: Path
) -> None:
    write_toy_checkpoint(tmp_path / "toy", "AcmeToyForCausalLM")
    with pytest.raises(ModelLoadError) as error:
        open_llm(model=str(tmp_path / "toy"))
    assert "architecture 'AcmeToyForCausalLM' is not supported" in str(error.value)
    assert str(error.value).endswith(
        "auto takes no other package's plugin: set model.name to use toy (acme-plugins 3.1)"
    )


# -- kernels and quantization ----------------------------------------------------------------------


def test_kernels_from_a_scratch_package_run_every_layer(open_llm: OpenLLM, acme: Acme) -> None:
    expected = token_ids(open_llm())
    llm = open_llm(kernels="counting", attention="torch_sdpa")  # doesn't rotate
    num_steps: list[int] = []
    llm.on_step(lambda record: num_steps.append(record.step_id))
    assert token_ids(llm) == expected
    (kernels,) = acme("acme_kernels").BUILT
    layers, steps = 2, len(num_steps)
    assert kernels.num_calls == {
        "embedding dense": steps,
        "linear dense": (4 * layers + 1) * steps,
        "rms_norm": (2 * layers + 1) * steps,
        "rope": layers * steps,
        "silu_and_mul": layers * steps,
    }


def test_quantized_weights_are_executed_by_the_kernels_that_know_them(
    open_llm: OpenLLM, acme: Acme
) -> None:
    params = greedy(1, prompt_logprobs=0)
    dense = open_llm().generate(PROMPTS, params)
    llm = open_llm(quantization="acme_int8", kernels="counting")
    quantized = llm.generate(PROMPTS, params)
    for ours, theirs in zip(quantized, dense, strict=True):
        for mine, reference in zip(
            ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True
        ):
            assert mine.token.logprob == pytest.approx(reference.token.logprob, abs=0.3)
            assert mine.token.logprob != reference.token.logprob
    (kernels,) = acme("acme_kernels").BUILT
    assert kernels.num_calls["linear acme_int8"] > 0
    assert kernels.num_calls["linear dense"] == 0


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_format_that_the_kernels_lack_is_refused_before_weights_are_read(
    open_llm: OpenLLM, acme: Acme, kernels: str
) -> None:
    with pytest.raises(ConfigError) as error:
        open_llm(quantization="acme_int8", kernels=kernels)
    assert "weight format 'acme_int8' is not supported (it has dense)" in str(error.value)
    assert acme("acme_int8").LOADED == []


def test_head_and_embedding_that_are_tied_share_one_quantized_weight(
    open_llm: OpenLLM, tmp_path: Path, acme: Acme
) -> None:
    tied = write_tiny_checkpoint(tmp_path / "tied", tiny_llama_config(tie_word_embeddings=True))
    llm = open_llm(model=str(tied), quantization="acme_int8", kernels="counting")
    assert [len(one) for one in token_ids(llm)] == [12] * 3
    (kernels,) = acme("acme_kernels").BUILT
    assert kernels.num_calls["embedding acme_int8"] > 0
    assert not [name for name in kernels.num_calls if name.endswith("dense")]
    assert acme("acme_int8").LOADED.count("model.embed_tokens.weight") == 1


def test_kernels_that_do_not_look_up_rows_of_a_format_are_refused(
    open_llm: OpenLLM, acme: Acme
) -> None:
    module = acme("acme_kernels")
    component = module.hotshoe_component()
    capabilities = replace(component.capabilities, embedding_formats=("dense",))
    module.hotshoe_component = hookimpl(lambda: replace(component, capabilities=capabilities))
    with pytest.raises(ConfigError) as error:
        open_llm(quantization="acme_int8", kernels="counting")
    assert str(error.value) == (
        "kernels.name 'counting' can't be used: embedding format 'acme_int8' is not supported (it "
        "has dense), needed by quantization 'acme_int8'"
    )
    assert acme("acme_int8").LOADED == []


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        (
            {"weight_formats": ("dense",), "embedding_formats": ("acme_int8",)},
            "the weight of 'model.embed_tokens' has format 'acme_int8', but linear of "
            "CountingKernels executes only 'dense'",
        ),
        (
            {"weight_formats": ("acme_int8",)},
            "the weight of 'model.embed_tokens' has format 'acme_int8', but embedding of "
            "CountingKernels executes only 'dense'",
        ),
    ],
)
def test_weight_in_a_format_that_the_kernels_lack_is_refused_by_its_name(
    open_llm: OpenLLM, tmp_path: Path, acme: Acme, capabilities: dict[str, Any], message: str
) -> None:
    tied = write_tiny_checkpoint(tmp_path / "tied", tiny_llama_config(tie_word_embeddings=True))
    acme("acme_kernels").CountingKernels.capabilities = KernelsCapabilities(**capabilities)
    with pytest.raises(ModelLoadError) as error:
        open_llm(model=str(tied), quantization="acme_int8", kernels="counting")
    assert message in str(error.value)


def test_kernels_that_are_handed_in_are_checked_like_those_of_a_plugin(
    tiny_checkpoint: Path, acme: Acme
) -> None:
    kernels = acme("acme_kernels").CountingKernels()
    kernels.capabilities = KernelsCapabilities(weight_formats=("acme_int8",))
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_checkpoint), kernels=kernels)
    assert str(error.value).startswith(
        "kernels CountingKernels can't be used: weight format 'dense'"
    )


def test_quantization_that_tells_no_formats_is_refused(open_llm: OpenLLM, acme: Acme) -> None:
    module = acme("acme_int8")
    component = replace(module.hotshoe_component(), capabilities=None)
    module.hotshoe_component = hookimpl(lambda: component)
    with pytest.raises(ConfigError) as error:
        open_llm(quantization="acme_int8", kernels="counting")
    assert "quantization.name 'acme_int8' can't be used: its component has no Quant" in str(
        error.value
    )


# -- executors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("spec_decode", [None, "ngram"])
def test_executor_from_a_scratch_package_runs_the_same_steps(
    open_llm: OpenLLM, acme: Acme, max_in_flight: int, spec_decode: str | None
) -> None:
    sections: dict[str, Any] = {
        "scheduler": {"max_num_batched_tokens": 16},
        "cache": {"block_size": 4, "num_blocks": 25},
        "model": {"max_model_len": 100},
    }
    prompts = [*PROMPTS, "ab" * 20]
    params = [greedy(30), SamplingParams(max_tokens=20, seed=3), greedy(5), greedy(40)]
    expected = token_ids(open_llm(**sections), prompts, params)
    executor = {"name": "threaded", "options": {"max_in_flight": max_in_flight}}
    llm = open_llm(executor=executor, spec_decode=spec_decode, **sections)
    assert token_ids(llm, prompts, params) == expected
    assert token_ids(llm, prompts, params) == expected
    assert {name.rpartition("_")[0] for name in acme("acme_executor").THREADS} == {"acme-steps"}
    assert llm.engine.kv_cache.num_free_blocks == 25


# -- eviction --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kept"), [("lru", [1, 2]), ("mru", [0])])
def test_eviction_policy_decides_which_prefix_stays_cached(
    open_llm: OpenLLM, name: str, kept: list[int]
) -> None:
    prompts = [letter * 40 for letter in "abc"]
    llm = open_llm(
        model={"max_model_len": 64},
        cache={"eviction": name, "block_size": 4, "num_blocks": 25},
    )
    for prompt in prompts:
        llm.generate(prompt, greedy(1))
    cached = []
    for index in kept:
        (output,) = llm.generate(prompts[index], greedy(1))
        cached.append(output.outputs[0].metrics.num_cached_tokens)
    assert all(num > 20 for num in cached)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_eviction_changes_no_output(open_llm: OpenLLM, seed: int) -> None:
    prompts = [letter * 30 for letter in "abcabc"] + PROMPTS
    expected = token_ids(open_llm(), prompts)
    llm = open_llm(
        model={"max_model_len": 64},
        cache={
            "eviction": {"name": "random", "options": {"seed": seed}},
            "block_size": 4,
            "num_blocks": 25,
        },
    )
    for _ in range(2):
        assert token_ids(llm, prompts) == expected


# -- logits processors -----------------------------------------------------------------------------


def test_logits_processor_applies_to_every_request_or_to_those_that_ask(
    open_llm: OpenLLM,
) -> None:
    plain = token_ids(open_llm())
    banned = sorted({one for output in plain for one in output})
    entry = {"name": "ban", "options": {"token_ids": banned}}
    asking = greedy(logits_processors=("ban",))
    on_request = open_llm(sampler={"logits_processors": [{**entry, "apply": "on_request"}]})
    mixed = token_ids(on_request, PROMPTS, [greedy(), asking, greedy()])
    assert [mixed[0], mixed[2]] == [plain[0], plain[2]]
    assert not set(mixed[1]) & set(banned)
    always = open_llm(sampler={"logits_processors": [{**entry, "apply": "always"}]})
    assert not {one for output in token_ids(always) for one in output} & set(banned)


def test_logits_processor_that_raises_fails_that_request_only(open_llm: OpenLLM) -> None:
    llm = open_llm(sampler={"logits_processors": ["ban"]})
    wrong = greedy(logits_processors=("ban",), extra_args={"ban": "everything"})
    right = greedy(logits_processors=("ban",), extra_args={"ban": [1, 2]})
    outputs = llm.generate(PROMPTS, [right, wrong, greedy()], on_error="return")
    assert [one.outputs[0].finish_reason for one in outputs] == ["length", "error", "length"]
    assert (
        "logits processor 'ban' failed with ValueError: extra_args.ban is 'everything'; "
        "allowed: a list of token ids" in outputs[1].outputs[0].error
    )


def test_request_for_a_processor_that_is_not_loaded_is_refused(open_llm: OpenLLM) -> None:
    llm = open_llm(sampler={"logits_processors": ["ban"]})
    with pytest.raises(RequestError, match=r"logits_processors: got 'bann', .*processors: ban"):
        llm.generate(PROMPTS[0], greedy(logits_processors=("bann",)))
