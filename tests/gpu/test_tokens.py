"""Engines on the GPU say what the reference says on the CPU, whatever is turned on or off."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from drafts.heads import write_eagle3
from gpu.comparing import assert_drawn, assert_greedy
from gpu.workload import GREEDY, MAX_TOKENS, PROMPTS, SAMPLED, OpenLLM, token_ids
from hotshoe import LLM, RequestOutput, SamplingParams
from hotshoe.api import StructuredOutputs
from hotshoe.testing.models import tiny_llama_config

NO_GRAPHS: dict[str, Any] = {"kernels": {"record": False}}
NO_OVERLAP: dict[str, Any] = {"executor": {"name": "uniproc", "options": {"max_in_flight": 1}}}
VARIANTS: dict[str, dict[str, Any]] = {
    "as auto makes it": {},
    "no graphs": NO_GRAPHS,
    "no overlap": NO_OVERLAP,
    "neither": NO_GRAPHS | NO_OVERLAP,
    "far ahead": {"executor": {"name": "uniproc", "options": {"max_in_flight": 3}}},
    "plain torch": {"kernels": "torch", "attention": "torch_sdpa", "sampler": "standard"},
    "few buckets": {"kernels": {"record_batch_sizes": [3, 40]}},
    "chunked prompts": {"max_num_batched_tokens": 96, "max_num_seqs": 24},
    "preemption": {"cache": {"num_blocks": 120}},
}


def drafting(name: str, **options: Any) -> dict[str, Any]:
    return {"spec_decode": {"name": name, "options": options, "adaptive": False}}


def test_auto_takes_triton(gpu_llm: LLM) -> None:
    for section in ("kernels", "attention", "sampler"):
        assert gpu_llm.components[section].startswith("triton ")


def test_decode_steps_are_recorded(open_llm: OpenLLM, caplog: pytest.LogCaptureFixture) -> None:
    """Without it every other test here would pass as well."""
    with (
        caplog.at_level(logging.INFO, "hotshoe"),
        open_llm(kernels={"record_batch_sizes": [2, 5]}) as llm,
    ):
        llm.generate(PROMPTS[:4], GREEDY)
    messages = [record.getMessage() for record in caplog.records]
    assert any(one.startswith("recorded steps of 2, 5 requests") for one in messages), messages


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_greedy_and_drawn_tokens_are_those_of_the_cpu(
    open_llm: OpenLLM,
    greedy_on_cpu: list[RequestOutput],
    sampled_on_cpu: list[list[int]],
    changes: dict[str, Any],
) -> None:
    with open_llm(**changes) as llm:
        greedy = llm.generate(PROMPTS, GREEDY)
        assert_greedy(greedy_on_cpu, token_ids(greedy))
        assert_drawn(sampled_on_cpu, token_ids(llm.generate(PROMPTS, SAMPLED)))
        # now the prompts come from the prefix cache
        assert_greedy(greedy_on_cpu, token_ids(llm.generate(PROMPTS, GREEDY)))


def test_greedy_text_is_that_of_the_cpu(gpu_llm: LLM, greedy_on_cpu: list[RequestOutput]) -> None:
    outputs = gpu_llm.generate(PROMPTS, GREEDY)
    same = [one.text == two.text for one, two in zip(outputs, greedy_on_cpu, strict=True)]
    assert sum(same) >= len(PROMPTS) - 2
    assert any(one.text for one in outputs)


def test_log_probabilities_are_those_of_the_cpu(
    gpu_llm: LLM, greedy_on_cpu: list[RequestOutput]
) -> None:
    first = [one.outputs[0].logprobs[0].token.logprob for one in greedy_on_cpu]  # type: ignore[index]
    found = [
        one.outputs[0].logprobs[0].token.logprob  # type: ignore[index]
        for one in gpu_llm.generate(PROMPTS, GREEDY)
    ]
    assert found == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "op by op"])
@pytest.mark.parametrize("kind", ["ngram", "eagle"])
def test_drafts_change_no_token(
    open_llm: OpenLLM,
    greedy_on_cpu: list[RequestOutput],
    sampled_on_cpu: list[list[int]],
    tmp_path: Path,
    kind: str,
    is_recorded: bool,
) -> None:
    changes = drafting("ngram")
    if kind == "eagle":
        changes = drafting("eagle", model=str(write_eagle3(tmp_path)), num_draft_tokens=3)
    num_drafted = []
    with open_llm(**changes, kernels={"record": is_recorded}) as llm:
        llm.on_finish(lambda request: num_drafted.append(request.num_draft_tokens))
        assert_greedy(greedy_on_cpu, token_ids(llm.generate(PROMPTS, GREEDY)))
        assert_drawn(sampled_on_cpu, token_ids(llm.generate(PROMPTS, SAMPLED)))
    assert sum(num_drafted) > 0


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_constraints_hold_and_give_what_they_give_on_the_cpu(
    open_llm: OpenLLM, backend: str
) -> None:
    pytest.importorskip(backend)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    regex = r"[a-c]{3}-[0-9]{2}"
    constraints = [
        StructuredOutputs(json=json.dumps(schema)),
        StructuredOutputs(regex=regex),
        StructuredOutputs(choice=["yes", "no"]),
        None,
    ] * 4
    params = [
        SamplingParams(temperature=0.9, seed=number, max_tokens=120, structured_outputs=one)
        for number, one in enumerate(constraints)
    ]
    texts = {}
    for device in ("cpu", "cuda"):
        with open_llm(device=device, guided_decoding=backend) as llm:
            outputs = llm.generate(PROMPTS[: len(params)], params)
        texts[device] = [one.text for one in outputs]
        for output, constraint in zip(outputs, constraints, strict=True):
            if constraint is None or output.outputs[0].finish_reason != "stop":
                continue
            if constraint.regex is not None:
                assert re.fullmatch(regex, output.text)
            elif constraint.choice is not None:
                assert output.text in constraint.choice
            else:
                assert set(json.loads(output.text)) == {"name", "age"}
    assert_drawn(
        [[ord(character) for character in text] for text in texts["cpu"]],
        [[ord(character) for character in text] for text in texts["cuda"]],
    )


@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.06), ("float16", 0.01)])
def test_narrow_dtypes_score_prompts_as_float32_does(
    open_llm: OpenLLM, dtype: str, allowed: float
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def scores(**changes: Any) -> list[float]:
        with open_llm(**changes) as llm:
            outputs = llm.generate(PROMPTS[:8], params)
        return [
            entry.token.logprob
            for output in outputs
            for entry in output.prompt_logprobs or []
            if entry is not None
        ]

    differences = [
        abs(one - other)
        for one, other in zip(scores(device="cpu"), scores(dtype=dtype), strict=True)
    ]
    assert sum(differences) / len(differences) < allowed
    assert max(differences) < 10 * allowed


@pytest.mark.parametrize("scales", ["group", "row"])
def test_quantized_weights_score_prompts_as_on_the_cpu(open_llm: OpenLLM, scales: str) -> None:
    quantization = {"name": "int8", "options": {"scales": scales}}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def scores(**changes: Any) -> list[float]:
        with open_llm(**changes) as llm:
            outputs = llm.generate(PROMPTS[:8], params)
        return [
            entry.token.logprob
            for output in outputs
            for entry in output.prompt_logprobs or []
            if entry is not None
        ]

    expected = scores(device="cpu", kernels="cpu", quantization=quantization)
    found = scores(quantization=quantization)
    differences = [abs(one - other) for one, other in zip(expected, found, strict=True)]
    # either may round activations to 8 bits
    assert sum(differences) / len(differences) < 0.15


def test_random_weights_are_those_of_the_cpu(tmp_path: Path) -> None:
    config = tiny_llama_config(architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=2
    )
    prompts = [[*range(number, number + 9)] for number in range(16)]
    found = {}
    for device in ("cpu", "cuda"):
        model = {"path": str(tmp_path), "weights": "random"}
        with LLM(model, device=device, max_model_len=128) as llm:
            found[device] = llm.generate(prompts, params)
    assert_greedy(found["cpu"], token_ids(found["cuda"]))


def test_stop_strings_and_stop_tokens_end_outputs_where_they_do_on_the_cpu(
    open_llm: OpenLLM, gpu_llm: LLM, greedy_on_cpu: list[RequestOutput]
) -> None:
    stops = [output.outputs[0].token_ids[MAX_TOKENS // 2] for output in greedy_on_cpu]
    params = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=[stop])
        for stop in stops
    ]
    with open_llm(device="cpu") as llm:
        expected = llm.generate(PROMPTS, params)
    found = gpu_llm.generate(PROMPTS, params)
    ends = [(one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) for one in expected]
    same = [
        end == (one.outputs[0].finish_reason, len(one.outputs[0].token_ids))
        for end, one in zip(ends, found, strict=True)
    ]
    assert sum(same) >= len(PROMPTS) - 2
    assert {reason for reason, _ in ends} >= {"stop"}
