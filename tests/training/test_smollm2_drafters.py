"""The heads of ``examples/smollm2_drafters``, on the model that they were trained for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hotshoe import LLM, SamplingParams

PACKAGE = Path(__file__).parents[2] / "examples/smollm2_drafters/src/hotshoe_smollm2_drafters"
QUESTIONS = (
    "Can you suggest three ways to save water at home?",
    "Write a short story about a fox who learns to swim.",
    "What is the difference between weather and climate?",
    "How do I write a polite email to my landlord?",
)
TOKENS_PER_ROUND = {"eagle": 1.45, "medusa": 1.3}


@pytest.fixture(scope="module")
def drafters() -> ModuleType:
    """The package, which need not be installed."""
    spec = importlib.util.spec_from_file_location("smollm2_drafters", PACKAGE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain_answers() -> Iterator[list[list[int]]]:
    """What the model says without drafts."""
    with LLM(max_model_len=512) as llm:
        yield answer(llm)[0]


def answer(llm: LLM) -> tuple[list[list[int]], float]:
    """Greedy answers, and how many tokens a round brought."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    outputs = llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params)
    choices = [output.outputs[0] for output in outputs]
    accepted = [choice.metrics.num_accepted_tokens for choice in choices if choice.metrics]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    return [choice.token_ids for choice in choices], num_tokens / (num_tokens - sum(accepted))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_shipped_heads_are_often_right_and_change_nothing(
    kind: str, drafters: ModuleType, plain_answers: list[list[int]]
) -> None:
    path = getattr(drafters, kind.upper())
    drafter = {"name": kind, "options": {"model": str(path)}, "adaptive": False}
    with LLM(max_model_len=512, spec_decode=drafter) as llm:
        answers, tokens_per_round = answer(llm)
    assert answers == plain_answers
    assert tokens_per_round > TOKENS_PER_ROUND[kind]


def test_shipped_heads_take_16_megabytes_at_most(drafters: ModuleType) -> None:
    sizes = [
        (path / "model.safetensors").stat().st_size for path in (drafters.EAGLE, drafters.MEDUSA)
    ]
    assert sum(sizes) <= 16e6
