"""Plugins that are written outside of the repository, and selected by name in a YAML file."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import ConfigError

SOURCES = sorted((Path(__file__).parent / "plugins_src").glob("*.py"))
PROMPTS = ["the first prompt", "another one", "and a third"]

OpenLLM = Callable[..., LLM]


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def token_ids(llm: LLM, prompts: Any = PROMPTS, params: Any = None) -> list[list[int]]:
    outputs = llm.generate(prompts, params or greedy())
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_scratch_plugin_imports_nothing_of_hotshoe_but_its_api(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or ".")
    ours = {name for name in imported if name.startswith((".", "hotshoe"))}
    assert ours <= {"hotshoe.api", "hotshoe.api.layers"}
    assert "hotshoe.api" in ours


def test_scheduler_from_a_scratch_package_decides_who_runs_first(open_llm: OpenLLM) -> None:
    llm = open_llm(scheduler={"name": "lifo", "max_num_seqs": 1})
    assert llm.components["scheduler"] == "lifo (acme-plugins 3.1)"
    finished: list[int] = []
    llm.on_finish(lambda request: finished.append(request.num_output_tokens))
    llm.generate(PROMPTS, [greedy(3), greedy(4), greedy(5)])
    assert finished == [5, 4, 3]


def test_attention_from_a_scratch_package_equals_the_reference(
    open_llm: OpenLLM, acme: Callable[[str], Any]
) -> None:
    # several chunks per prompt, several requests per step
    sections = {"scheduler": {"max_num_batched_tokens": 8}, "cache": {"block_size": 4}}
    expected = token_ids(open_llm(attention="torch_sdpa", **sections))
    llm = open_llm(attention="naive", **sections)
    assert llm.components["attention"] == "naive (acme-plugins 3.1)"
    num_steps: list[int] = []
    llm.on_step(lambda record: num_steps.append(record.step_id))
    assert token_ids(llm) == expected
    (backend,) = acme("acme_attention").BUILT
    num_layers = 2
    assert backend.num_steps == len(num_steps)
    assert backend.num_calls == num_layers * len(num_steps)


def test_attention_that_cannot_run_the_model_is_refused_with_its_reasons(
    open_llm: OpenLLM,
) -> None:
    with pytest.raises(ConfigError) as error:
        open_llm(attention="naive", model={"dtype": "bfloat16"})
    assert "attention.name 'naive' can't be used: no dtype 'bfloat16'" in str(error.value)


def test_sampler_from_a_scratch_package_chooses_the_tokens(open_llm: OpenLLM) -> None:
    llm = open_llm(sampler="runner_up")
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
    for output in llm.generate(PROMPTS, params):
        assert [position.token.rank for position in output.outputs[0].logprobs] == [2] * 8


def test_sampler_is_not_asked_about_greedy_requests_whatever_runs_beside_them(
    open_llm: OpenLLM,
) -> None:
    expected = token_ids(open_llm(), PROMPTS[:1])
    llm = open_llm(sampler="runner_up")
    assert token_ids(llm, PROMPTS[:1]) == expected
    drawn = SamplingParams(max_tokens=12, ignore_eos=True)
    assert token_ids(llm, PROMPTS[:2], [greedy(), drawn])[:1] == expected


def test_drafts_from_a_scratch_package_are_verified_and_kept(
    open_llm: OpenLLM, acme: Callable[[str], Any]
) -> None:
    plain = open_llm()
    expected = token_ids(plain)
    texts = [
        plain.tokenizer.encode(prompt) + output
        for prompt, output in zip(PROMPTS, expected, strict=True)
    ]
    texts[2] = [*texts[2][:-4], 1, 2, 3, 4]  # these are wrong
    options = {"texts": texts, "num_draft_tokens": 3}
    llm = open_llm(spec_decode={"name": "oracle", "options": options, "adaptive": False})
    num_steps: list[int] = []
    llm.on_step(lambda record: num_steps.append(record.step_id))
    outputs = llm.generate(PROMPTS, greedy())
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert len(num_steps) < 12
    (drafter,) = acme("acme_drafter").BUILT
    assert sorted(drafter.forgotten) == sorted(f"{one.request_id}/0" for one in outputs)
    assert [one.outputs[0].metrics.num_accepted_tokens > 5 for one in outputs] == [True] * 3
