"""Drafters with weights change no token, right or wrong, however requests are run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafts.heads import (
    write_bigram_target,
    write_eagle1,
    write_eagle3,
    write_medusa,
    write_perfect_eagle1,
    write_perfect_eagle3,
)
from golden.checks import check_greedy, check_sampled, compare_greedy_rounds
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import VARIATIONS, Variation, run, running
from golden.workloads import greedy_jobs, sampled_jobs, tiny_prompts
from hotshoe import LLM, SamplingParams

NATIVE = {"kernels": "cpu", "attention": "cpu", "sampler": "cpu"}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Any]:
    """Settings by name: drafters for the tiny model, the last of which is always right, and for the
    bigram model.
    """
    root = tmp_path_factory.mktemp("drafters")
    folders = {
        "eagle3": ("eagle", write_eagle3(root / "eagle3")),
        "eagle1": ("eagle", write_eagle1(root / "eagle1")),
        "medusa": ("medusa", write_medusa(root / "medusa")),
        "itself": ("draft_model", tiny_folder),
        "perfect_eagle3": ("eagle", write_perfect_eagle3(root / "perfect3")),
        "knows_half": ("eagle", write_perfect_eagle3(root / "half", draft_vocab=130)),
        "perfect_eagle1": ("eagle", write_perfect_eagle1(root / "perfect1")),
    }
    return {
        name: {"name": plugin, "options": {"model": str(folder)}, "adaptive": False}
        for name, (plugin, folder) in folders.items()
    }


@pytest.fixture(scope="module")
def bigram_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bigram_target(tmp_path_factory.mktemp("bigram"))


@pytest.fixture(scope="module")
def bigram_oracle(bigram_folder: Path) -> Oracle:
    return Oracle.folder(bigram_folder)


def with_drafter(variation: Variation, drafter: dict[str, Any], **more: Any) -> Variation:
    settings = dict(variation.settings) | NATIVE | {"spec_decode": drafter}
    return replace(variation, settings=settings, **more)


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa"])
def test_greedy_output_equals_transformers(
    name: str, drafters: dict[str, Any], tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    way = with_drafter(VARIATIONS["everything"], drafters[name])
    jobs = greedy_jobs(tiny_prompts(), 40)
    check_greedy(str(tiny_folder), tiny_oracle, way, jobs, tally)


@pytest.mark.parametrize("name", ["eagle3", "itself"])
def test_sampled_output_is_what_the_seeds_draw(
    name: str, drafters: dict[str, Any], tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    way = with_drafter(VARIATIONS["everything"], drafters[name])
    jobs = sampled_jobs(tiny_prompts(), 40)
    check_sampled(str(tiny_folder), tiny_oracle, way, jobs, tally)


@pytest.mark.parametrize(
    ("variation", "name"),
    [
        ("everything", "itself"),
        ("everything", "perfect_eagle3"),
        ("everything", "perfect_eagle1"),
        ("everything", "knows_half"),
        ("one_at_a_time", "knows_half"),
    ],
)
def test_drafts_of_heads_that_know_the_model_are_kept(
    variation: str,
    name: str,
    drafters: dict[str, Any],
    tiny_folder: Path,
    tiny_oracle: Oracle,
    bigram_folder: Path,
    bigram_oracle: Oracle,
    tally: Tally,
) -> None:
    folder, oracle = (
        (tiny_folder, tiny_oracle) if name == "itself" else (bigram_folder, bigram_oracle)
    )
    way = with_drafter(VARIATIONS[variation], drafters[name], must_accept=True)
    jobs = greedy_jobs(tiny_prompts(), 40)
    with running(str(folder), way, jobs) as llm:
        rounds = run(llm, way, jobs)
    compare_greedy_rounds(oracle, rounds, jobs, tally)
    choices = [choice for jobs in rounds for job in jobs for choice in job]
    metrics = [one.metrics for one in choices if one.metrics]
    num_drafted = sum(one.num_draft_tokens for one in metrics)
    num_kept = sum(one.num_accepted_tokens for one in metrics)
    assert num_kept > 10 * len(choices)
    assert (num_kept == num_drafted) is (name != "knows_half")


def test_outputs_end_where_they_end_without_drafts(
    drafters: dict[str, Any], bigram_folder: Path
) -> None:
    prompt = tiny_prompts()[2]
    results = []
    for drafter in (None, drafters["perfect_eagle3"]):
        settings = {} if drafter is None else {"spec_decode": drafter}
        with LLM(str(bigram_folder), dtype="float32", max_model_len=64, **settings) as llm:
            (probe,) = llm.generate(
                [prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            )
            ids, text = probe.outputs[0].token_ids, probe.outputs[0].text
            params = [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                for count in (1, 2, 3, 7, 49)
            ]
            params += [
                SamplingParams(temperature=0, stop_token_ids=[ids[8]], max_tokens=30),
                SamplingParams(temperature=0, stop=[text[5:7]], max_tokens=30, ignore_eos=True),
                SamplingParams(temperature=0, logprobs=2, max_tokens=9, ignore_eos=True),
            ]
            outputs = [output.outputs[0] for output in llm.generate([prompt] * len(params), params)]
            results.append([(one.token_ids, one.text, one.finish_reason) for one in outputs])
    assert results[0] == results[1]
