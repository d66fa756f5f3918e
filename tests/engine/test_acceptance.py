"""``spec_decode.acceptance`` in the engine: what tokens are drawn from, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    CompiledGrammar,
    ConfigError,
    DraftTokens,
    Grammar,
    GrammarSpec,
    GuidedDecodingBackend,
    ProposeInput,
    Proposer,
    StructuredOutputs,
)
from hotshoe.testing.distributions import Filter, assert_follows, filtered_probabilities
from hotshoe.testing.scripted_model import installed_scripted_model

VOCAB_SIZE = 14
NUMBERS = np.random.default_rng(8)
LOGITS = (NUMBERS.normal(size=VOCAB_SIZE) * 1.5).astype(np.float32)
DRAFTER = (LOGITS + NUMBERS.normal(size=VOCAB_SIZE)).astype(np.float32)
DRAFTER[[4, 8, 12]] -= 5.0  # of the even tokens it draws the others mostly
RULES = ("leviathan", "typical")


class DrawnTokens(Proposer):
    """Draws drafts from logits that are the same everywhere."""

    max_draft_tokens = 3

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        drafts: list[list[int]] = [[] for _ in inputs.request_ids]
        places = [
            (request, place)
            for request, most in enumerate(inputs.max_draft_tokens)
            for place in range(most)
        ]
        if places:
            logits = torch.from_numpy(np.tile(DRAFTER, (len(places), 1)))
            if inputs.draws is None:
                found = logits.argmax(-1)
            else:
                requests, before = zip(*places, strict=True)
                found = inputs.draws.draw(logits, list(requests), list(before))
            for (request, _), token in zip(places, found.tolist(), strict=True):
                drafts[request].append(token)
        return DraftTokens(token_ids=drafts)


class EvenTokens(GuidedDecodingBackend, CompiledGrammar, Grammar):
    """Allows even tokens, whatever is asked for."""

    def unsupported(self, spec: GrammarSpec) -> list[str]:
        return []

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self

    def matcher(self) -> Grammar:
        return self

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.validate(token_ids) == len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        return [*(token % 2 for token in token_ids), 1].index(1)

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        bitmask[row] = 0x5555

    @property
    def is_terminated(self) -> bool:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model with the same logits everywhere, and the plugin that runs it."""
    logits = torch.from_numpy(LOGITS)[None, None]
    with installed_scripted_model(tmp_path_factory.mktemp("scripted"), logits) as model:
        yield model


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the rule beside a drafter that is handed in."""

    def choose(rule: str) -> None:
        monkeypatch.setenv("HOTSHOE_SPEC_DECODE__ADAPTIVE", "false")
        monkeypatch.setenv("HOTSHOE_SPEC_DECODE__ACCEPTANCE", rule)

    return choose


def generate(folder: Path, num_prompts: int, **params: Any) -> list[list[int]]:
    """A hundred tokens of each prompt, and some more that are other requests'."""
    model = {"path": str(folder), "name": "scripted", "dtype": "float32", "max_model_len": 128}
    params = {"max_tokens": 100, "ignore_eos": True, "detokenize": False, **params}
    chosen = [SamplingParams(seed=seed, **params) for seed in range(num_prompts)]
    parts: dict[str, Any] = {"spec_decode": DrawnTokens(), "guided_decoding": EvenTokens()}
    with LLM(model=model, **parts) as llm:
        outputs = llm.generate([[seed % VOCAB_SIZE] for seed in range(num_prompts)], chosen)
        assert sum(one.outputs[0].metrics.num_accepted_tokens for one in outputs) > 0
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rejection_sampling_under_a_grammar_draws_from_what_the_grammar_leaves(
    folder: Path, acceptance: Any, temperature: float
) -> None:
    acceptance("leviathan")
    grammar = StructuredOutputs(regex="even")
    outputs = generate(
        folder, 200, temperature=temperature, structured_outputs=grammar, ignore_eos=False
    )
    assert sum(map(len, outputs)) == 20_000  # no token ends an output
    masked = np.where(np.arange(VOCAB_SIZE) % 2 == 0, LOGITS, -np.inf).astype(np.float32)
    expected = filtered_probabilities(masked, Filter(temperature=temperature))
    assert_follows([token for tokens in outputs for token in tokens], expected)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_drafts_and_seeds_give_the_same_tokens_whoever_is_beside(
    folder: Path, acceptance: Any, rule: str
) -> None:
    acceptance(rule)
    many, again, few = (generate(folder, count, logprobs=1) for count in (9, 9, 2))
    assert many == again
    assert many[:2] == few


@pytest.mark.parametrize("rule", RULES)
def test_greedy_tokens_are_the_same_with_each_rule(
    folder: Path, acceptance: Any, rule: str
) -> None:
    acceptance(rule)
    outputs = generate(folder, 3, temperature=0)
    assert outputs == [[int(LOGITS.argmax())] * 100] * 3


def test_typical_acceptance_makes_likely_tokens_likelier_and_says_so(
    folder: Path, acceptance: Any, caplog: pytest.LogCaptureFixture
) -> None:
    acceptance("typical")
    with caplog.at_level(logging.WARNING):
        outputs = generate(folder, 50)
    [line] = [one for one in caplog.messages if "spec_decode.acceptance" in one]
    assert "CHANGES the distribution" in line
    drawn = [token for tokens in outputs for token in tokens]
    with pytest.raises(AssertionError, match="don't follow the target"):
        assert_follows(drawn, filtered_probabilities(LOGITS, Filter()))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_without_drafts_is_refused(tiny_path: Path, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"acceptance is '{rule}' but spec_decode.name is none"):
        LLM(str(tiny_path), spec_decode={"acceptance": rule})


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_by_which_tokens_depend_on_drafts_is_not_deterministic(rule: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic is true but .*acceptance is '{rule}'"):
        LLM(deterministic=True, spec_decode={"name": "ngram", "acceptance": rule})


def test_numbers_of_a_rule_that_is_not_chosen_are_refused() -> None:
    settings = {"name": "ngram", "acceptance": "leviathan", "typical_epsilon": 0.2}
    with pytest.raises(ConfigError, match=r"typical_epsilon is 0.2 but .* 'leviathan'"):
        LLM(spec_decode=settings)
