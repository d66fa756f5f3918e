"""Log probabilities of prompts and outputs against log_softmax of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from golden.oracle import Oracle
from golden.variations import REFERENCE_PARTS, Job, Variation, run, running
from golden.workloads import tiny_prompts
from hotshoe import LLM, RequestOutput, SamplingParams
from hotshoe.api import PositionLogprobs
from hotshoe.testing.models import TINY_VOCAB_SIZE

ATOL = 1e-4
PROMPTS = tiny_prompts()
NUM_TOP = 5


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), max_model_len=256, **REFERENCE_PARTS) as one:
        yield one


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})


def expected_logprobs(oracle: Oracle, token_ids: Sequence[int]) -> torch.Tensor:
    """``[num_tokens - 1, vocab_size]``: of every token but the first, given those before it."""
    return torch.from_numpy(oracle.logits(token_ids)[:-1]).log_softmax(-1)


def check(
    entries: Sequence[PositionLogprobs | None],
    expected: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int,
) -> None:
    """Entry i is about token i; expected row i is its distribution."""
    assert len(entries) == len(token_ids) == len(expected)
    for entry, row, token_id in zip(entries, expected, token_ids, strict=True):
        assert entry is not None
        assert entry.token.token_id == token_id
        assert entry.token.logprob == pytest.approx(row[token_id].item(), abs=ATOL)
        num_above = int((row > row[token_id] + ATOL).sum())
        num_not_below = int((row > row[token_id] - ATOL).sum())
        assert num_above + 1 <= entry.token.rank <= num_not_below
        assert [top.rank for top in entry.top] == list(range(1, num_top + 1))
        best = row.topk(num_top).values
        found = torch.tensor([top.logprob for top in entry.top])
        torch.testing.assert_close(found, best, atol=ATOL, rtol=0)
        own = row[torch.tensor([top.token_id for top in entry.top], dtype=torch.int64)]
        torch.testing.assert_close(found, own, atol=ATOL, rtol=0)


def check_output(oracle: Oracle, output: RequestOutput, num_top: int = NUM_TOP) -> None:
    """All log probabilities of prompt and choices."""
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    expected = expected_logprobs(oracle, prompt)
    check(output.prompt_logprobs[1:], expected, prompt[1:], num_top)
    for choice in output.outputs:
        assert choice.logprobs is not None
        expected = expected_logprobs(oracle, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
        check(choice.logprobs, expected, choice.token_ids, num_top)
        total = sum(row[i].item() for row, i in zip(expected, choice.token_ids, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total, abs=len(expected) * ATOL)


SETTINGS = {
    "plain": {},
    "chunks": {"long_prefill_token_threshold": 7},
    "small_batches": {"max_num_batched_tokens": 16},
    "drafts": {"spec_decode": {"name": "ngram", "options": {"min_ngram": 1}, "adaptive": False}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logprobs_equal_log_softmax_of_transformers(
    tiny_folder: Path, tiny_oracle: Oracle, settings: dict[str, object]
) -> None:
    scored = params(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    with LLM(str(tiny_folder), max_model_len=256, **REFERENCE_PARTS, **settings) as llm:
        outputs = llm.generate(PROMPTS, scored)
    for output in outputs:
        check_output(tiny_oracle, output)


def test_prompt_logprobs_are_complete_after_preemption(
    tiny_folder: Path, tiny_oracle: Oracle
) -> None:
    jobs = [Job(prompt, params(logprobs=0, prompt_logprobs=2)) for prompt in PROMPTS]
    preempting = Variation(
        settings={"max_num_batched_tokens": 64, "long_prefill_token_threshold": 16},
        is_pool_small=True,
        must_preempt=True,
    )
    with running(str(tiny_folder), preempting, jobs) as llm:
        [_] = run(llm, preempting, jobs)
        outputs = llm.generate(PROMPTS, [job.params for job in jobs])
    for output in outputs:
        assert output.prompt_logprobs is not None
        expected = expected_logprobs(tiny_oracle, output.prompt_token_ids)
        check(output.prompt_logprobs[1:], expected, output.prompt_token_ids[1:], 2)
    assert sum(len(output.outputs[0].logprobs or []) for output in outputs) == 12 * len(PROMPTS)


def test_prompt_logprobs_do_not_read_the_prefix_cache(llm: LLM, tiny_oracle: Oracle) -> None:
    prompt = PROMPTS[8]
    llm.generate([prompt], params())
    [cached] = llm.generate([prompt], params())
    assert cached.num_cached_tokens > 0

    for _ in range(2):
        [output] = llm.generate([prompt], params(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP))
        assert output.num_cached_tokens == 0
        check_output(tiny_oracle, output)


def test_minus_one_reports_the_whole_vocabulary(llm: LLM, tiny_oracle: Oracle) -> None:
    [output] = llm.generate([PROMPTS[5]], params(logprobs=-1, prompt_logprobs=-1))
    check_output(tiny_oracle, output, TINY_VOCAB_SIZE)


def test_logprobs_are_of_the_model_not_of_what_is_sampled_from(
    llm: LLM, tiny_oracle: Oracle
) -> None:
    changed = params(
        temperature=0.3,
        top_k=3,
        seed=1,
        repetition_penalty=1.5,
        logit_bias={5: 20.0},
        logprobs=NUM_TOP,
        prompt_logprobs=0,
    )
    [output] = llm.generate([PROMPTS[9]], changed)
    [choice] = output.outputs
    prompt = output.prompt_token_ids
    expected = expected_logprobs(tiny_oracle, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
    assert choice.logprobs is not None
    check(choice.logprobs, expected, choice.token_ids, NUM_TOP)


def test_prompts_are_scored_once_for_all_choices(llm: LLM, tiny_oracle: Oracle) -> None:
    [output] = llm.generate(
        [PROMPTS[9]], params(temperature=1, seed=2, n=3, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    )
    assert len(output.outputs) == 3
    check_output(tiny_oracle, output)


@pytest.mark.slow
def test_embedded_logprobs_equal_log_softmax_of_transformers(embedded_oracle: Oracle) -> None:
    with LLM(max_model_len=256, max_num_batched_tokens=48, **REFERENCE_PARTS) as llm:
        texts = ["The sea is", "Write down the numbers from one to ten: one, two, three, four,"]
        for output in llm.generate(texts, params(logprobs=3, prompt_logprobs=3)):
            check_output(embedded_oracle, output, 3)
    assert np.isfinite(output.outputs[0].cumulative_logprob)
