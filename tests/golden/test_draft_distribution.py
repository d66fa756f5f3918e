"""Drafters leave sampled tokens the same for a seed, and distributed as the target; with rejection
sampling the latter alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafts import heads
from golden.checks import check_greedy, check_sampled
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import NGRAM, Job, Variation, run, running
from golden.workloads import greedy_jobs, sampled_jobs, tiny_prompts
from hotshoe import SamplingParams
from hotshoe.api import NewRequest, SamplerContext
from hotshoe.testing.distributions import Filter, assert_follows, filtered_probabilities
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe.worker.sampling import SamplingStep, TokenSampler
from hotshoe_native.options import NativeOptions
from hotshoe_samplers import cpu

DRAFTERS = ("ngram", "eagle", "eagle1", "medusa", "draft_model")
EACH_DRAFTER = pytest.mark.parametrize("name", DRAFTERS)
EACH_TEMPERATURE = pytest.mark.parametrize("temperature", [0.7, 1.0])
VOCAB_SIZE = 16
NUM_BINS = 25

Settings = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with so few tokens that even drafters with random weights hit some."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), config())


def config() -> dict[str, Any]:
    return tiny_llama_config(vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=1, pad_token_id=0)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    """The target in transformers."""
    return Oracle.folder(folder)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """``spec_decode`` by drafter, with random weights."""
    root = tmp_path_factory.mktemp("drafters")
    eagle3 = heads.layer_config(
        draft_vocab_size=VOCAB_SIZE - 4,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1, 2]},
    )
    tensors = heads.eagle3_tensors(1, VOCAB_SIZE - 4)
    # all but the first four tokens
    tensors["d2t"] = torch.full((VOCAB_SIZE - 4,), 4)
    tensors["t2d"] = torch.arange(VOCAB_SIZE) >= 4
    paths = {
        "eagle": heads.write(root / "eagle", eagle3, tensors),
        "eagle1": heads.write_eagle1(root / "eagle1"),
        "medusa": heads.write_medusa(root / "medusa", is_lean=True),
        "draft_model": write_tiny_checkpoint(root / "draft_model", config(), seed=1),
    }
    weighted = {
        name: {"name": name.rstrip("1"), "options": {"model": str(path)}}
        for name, path in paths.items()
    }
    return {name: {**one, "adaptive": False} for name, one in ({"ngram": NGRAM} | weighted).items()}


def prompts() -> list[list[int]]:
    """Of every length, with common prefixes and repeated parts."""
    return [[token_id % VOCAB_SIZE for token_id in prompt] for prompt in tiny_prompts()]


@EACH_DRAFTER
def test_sampled_output_is_what_the_seeds_draw_with_each_drafter(
    name: str, drafters: Settings, folder: Path, oracle: Oracle, tally: Tally
) -> None:
    variation = Variation(settings={"spec_decode": drafters[name]}, must_accept=True)
    check_sampled(str(folder), oracle, variation, sampled_jobs(prompts(), 40), tally)


@pytest.mark.full
@EACH_DRAFTER
@EACH_TEMPERATURE
@pytest.mark.parametrize("acceptance", ["drafter_invariant", "leviathan"])
def test_a_hundred_thousand_tokens_follow_the_target_distribution(
    acceptance: str,
    temperature: float,
    name: str,
    drafters: Settings,
    folder: Path,
    oracle: Oracle,
) -> None:
    drafter = {**drafters[name], "acceptance": acceptance}
    check_distribution(folder, oracle, drafter, temperature, num_requests=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "acceptance"),
    [("medusa", "drafter_invariant"), ("medusa", "leviathan"), ("eagle", "leviathan")],
)
def test_tokens_follow_the_target_distribution_with_drawn_drafts(
    name: str, acceptance: str, drafters: Settings, folder: Path, oracle: Oracle
) -> None:
    drafter = {**drafters[name], "acceptance": acceptance}
    check_distribution(folder, oracle, drafter, 1.0, num_requests=60)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["leviathan", "typical"])
def test_greedy_tokens_are_the_same_with_every_rule(
    acceptance: str, drafters: Settings, folder: Path, oracle: Oracle, tally: Tally
) -> None:
    settings = {"spec_decode": {**drafters["medusa"], "acceptance": acceptance}}
    variation = Variation(settings=settings, must_accept=True)
    check_greedy(str(folder), oracle, variation, greedy_jobs(prompts(), 40), tally)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "error"), [(0.7, 0.1), (1.0, 1.0)])
def test_drafts_drawn_with_the_randomness_of_the_tokens_leave_them_distributed_as_they_were(
    temperature: float, error: float
) -> None:
    numbers = np.random.default_rng(6)
    logits = numbers.normal(size=VOCAB_SIZE).astype(np.float32) * 1.5
    drafter = torch.from_numpy(logits + error * numbers.normal(size=VOCAB_SIZE)).float()

    drawn, num_accepted = drawn_with_drafts(logits, drafter, temperature)

    assert len(drawn) >= 100_000
    assert num_accepted > 10_000
    assert_follows(drawn, filtered_probabilities(logits, Filter(temperature=temperature)))


@EACH_TEMPERATURE
def test_drawn_drafts_are_kept_more_often_than_the_most_likely_token(temperature: float) -> None:
    numbers = np.random.default_rng(7)
    logits = numbers.normal(size=VOCAB_SIZE).astype(np.float32)
    drafter = torch.from_numpy(logits + 0.1 * numbers.normal(size=VOCAB_SIZE)).float()
    likely = torch.where(torch.arange(VOCAB_SIZE) == drafter.argmax(), 50.0, 0.0)

    drawn, num_accepted = drawn_with_drafts(logits, drafter, temperature, num_tokens=5000)
    others, num_accepted_likely = drawn_with_drafts(logits, likely, temperature, num_tokens=5000)

    assert num_accepted / len(drawn) > 1.3 * num_accepted_likely / len(others)


def drawn_with_drafts(
    logits: NDArray[np.float32], drafter: Tensor, temperature: float, num_tokens: int = 100_000
) -> tuple[list[int], int]:
    """Tokens of many requests, three drafts a step drawn from the drafter's logits; how many of
    the tokens were drafts.
    """
    num_reqs, num_drafts = 256, 3
    sampler = cpu.build(
        NativeOptions(),
        SamplerContext(device=torch.device("cpu"), vocab_size=VOCAB_SIZE),
    )
    tokens = TokenSampler(
        sampler=sampler,
        max_num_seqs=num_reqs,
        vocab_size=VOCAB_SIZE,
        device=torch.device("cpu"),
    )
    rows = list(range(num_reqs))
    for row in rows:
        params = SamplingParams(temperature=temperature)
        tokens.add_row(row, NewRequest(str(row), row, [0], params, row, 0, 0, ()))
    num_known = np.ones(num_reqs, dtype=np.int64)
    requests = np.repeat(rows, num_drafts).tolist()
    places = list(range(num_drafts)) * num_reqs
    drawn: list[int] = []
    num_accepted = 0
    while len(drawn) < num_tokens:
        draws = tokens.draft_draws(rows, num_known)
        assert draws is not None
        drafts = draws.draw(drafter.repeat(len(requests), 1), requests, places)
        step = SamplingStep(
            rows=rows,
            request_ids=[str(row) for row in rows],
            draft_token_ids=drafts.view(-1, num_drafts).tolist(),
            logits=torch.from_numpy(np.tile(logits, (num_reqs * (num_drafts + 1), 1))),
            token_ids=np.zeros((num_reqs, 1), dtype=np.int32),
            num_tokens=num_known,
            num_prompt_tokens=np.ones(num_reqs, dtype=np.int64),
        )
        for row, new in enumerate(tokens.sample(step).token_ids):
            num_known[row] += len(new)
            num_accepted += len(new) - 1
            drawn += new
    return drawn, num_accepted


def check_distribution(
    model: Path,
    oracle: Oracle,
    spec_decode: Mapping[str, Any],
    temperature: float,
    num_requests: int,
) -> None:
    """A hundred tokens of each request: where a token falls in the target distribution after the
    tokens before it is uniform, whatever these were.
    """
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=100,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(num_requests)
    ]
    jobs = [Job([seed % VOCAB_SIZE, 2], one) for seed, one in enumerate(params)]
    variation = Variation(settings={"spec_decode": spec_decode}, must_accept=True)
    with running(str(model), variation, jobs) as llm:
        [outputs] = run(llm, variation, jobs)
    sequences = [
        [*job.prompt, *choice.token_ids] for job, [choice] in zip(jobs, outputs, strict=True)
    ]
    bins = bins_of(oracle, sequences, len(jobs[0].prompt), temperature)
    assert len(bins) == 100 * num_requests
    assert_follows(bins.tolist(), np.full(NUM_BINS, 1 / NUM_BINS))


@torch.inference_mode()
def bins_of(
    oracle: Oracle, sequences: Sequence[Sequence[int]], num_prompt: int, temperature: float
) -> NDArray[np.int64]:
    """Which of equal parts of the target's cumulated distribution each token is in: a token that
    reaches over several is in one of them at random.
    """
    numbers = np.random.default_rng(0)
    found = []
    for start in range(0, len(sequences), 100):
        token_ids = torch.tensor(sequences[start : start + 100])
        logits = oracle.model(token_ids).logits[:, num_prompt - 1 : -1]
        probs = (logits.double() / temperature).softmax(-1).flatten(0, 1).numpy()
        drawn = token_ids[:, num_prompt:].flatten().numpy()
        rows = np.arange(len(drawn))
        ends = probs.cumsum(-1)[rows, drawn]
        places = ends - numbers.random(len(drawn)) * probs[rows, drawn]
        found.append((places * NUM_BINS).astype(np.int64).clip(0, NUM_BINS - 1))
    return np.concatenate(found)
