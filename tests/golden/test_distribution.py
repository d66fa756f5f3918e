"""Tokens that leave the engine follow the target distribution, with drafts and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hotshoe import LLM, SamplingParams
from hotshoe.api import Candidates, DraftTokens, ProposeInput, Proposer, SampleInput, Sampler
from hotshoe.testing.distributions import Filter, assert_follows, filtered_probabilities
from hotshoe.testing.scripted_model import installed_scripted_model

VOCAB_SIZE = 14
NUM_PROMPTS, NUM_CHOICES, NUM_TOKENS = 125, 4, 100
LOGITS = (np.random.default_rng(5).normal(size=VOCAB_SIZE) * 1.5).astype(np.float32)
FILTERS = {
    "plain": Filter(),
    "top_p": Filter(temperature=0.8, top_p=0.8),
    "all": Filter(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
}


class LikelyTokens(Proposer):
    """Drafts likely tokens, so that some are kept and some are not."""

    max_draft_tokens = 3

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        likely = np.argsort(-LOGITS)[:3]
        drafts = [
            likely[(history[-1] + np.arange(limit)) % 3].tolist()
            for history, limit in zip(inputs.token_ids, inputs.max_draft_tokens, strict=True)
        ]
        return DraftTokens(token_ids=drafts)


class BiasedSampler(Sampler):
    """Takes two percent from the most likely token and gives them to the first one."""

    def candidates(self, inputs: SampleInput) -> Candidates:
        probs = inputs.logits.softmax(-1)
        probs[:, LOGITS.argmax()] -= 0.02
        probs[:, 0] += 0.02
        return Candidates(probs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model with the same logits everywhere, and the plugin that runs it."""
    logits = torch.from_numpy(LOGITS)[None, None]
    with installed_scripted_model(tmp_path_factory.mktemp("scripted"), logits) as model:
        yield model


def draws(folder: Path, chosen: Filter, **parts: object) -> tuple[list[int], int]:
    """Fifty thousand tokens, and how many of them were accepted drafts."""
    params = [
        SamplingParams(
            n=NUM_CHOICES,
            temperature=chosen.temperature,
            top_k=chosen.top_k,
            top_p=chosen.top_p,
            min_p=chosen.min_p,
            seed=seed,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(NUM_PROMPTS)
    ]
    prompts = [[seed % VOCAB_SIZE] for seed in range(NUM_PROMPTS)]
    model = {"path": str(folder), "name": "scripted", "dtype": "float32", "max_model_len": 128}
    with LLM(**{"model": model, **parts}) as llm:
        outputs = llm.generate(prompts, params)
    choices = [choice for output in outputs for choice in output.outputs]
    accepted = sum(choice.metrics.num_accepted_tokens for choice in choices if choice.metrics)
    return [token_id for choice in choices for token_id in choice.token_ids], accepted


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["standard", "cpu"])
@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("chosen", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_follow_the_target_distribution(
    folder: Path,
    chosen: Filter,
    has_drafts: bool,
    sampler: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOTSHOE_SPEC_DECODE__ADAPTIVE", "false")
    parts = {"spec_decode": LikelyTokens()} if has_drafts else {}

    drawn, num_accepted = draws(folder, chosen, sampler=sampler, **parts)

    assert len(drawn) == NUM_PROMPTS * NUM_CHOICES * NUM_TOKENS == 50_000
    assert (num_accepted > 1000) == has_drafts
    assert_follows(drawn, filtered_probabilities(LOGITS, chosen))


@pytest.mark.slow
def test_a_sampler_biased_by_two_percent_is_rejected(folder: Path) -> None:
    drawn, _ = draws(folder, FILTERS["plain"], sampler=BiasedSampler())

    with pytest.raises(AssertionError, match="don't follow the target"):
        assert_follows(drawn, filtered_probabilities(LOGITS, FILTERS["plain"]))
