"""Jobs for the golden tests: prompts with parameters of every kind."""

from __future__ import annotations

import random
from typing import Any

from golden.prompts import PLAIN, conversations
from golden.variations import Job
from hotshoe import SamplingParams
from hotshoe.testing.models import NUM_BYTES
from hotshoe.text.chat import render_chat
from hotshoe.text.tokenizer import Tokenizer

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "n": 3},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    {"temperature": 0.5, "top_p": 0.8, "n": 3},
    {"temperature": 0.2, "repetition_penalty": 0.9},
]


def embedded_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """All 64 prompts, conversations first."""
    chats = [render_chat(tokenizer, messages) for messages in conversations()]
    return [*chats, *(tokenizer.encode(text) for text in PLAIN)]


def tiny_prompts() -> list[list[int]]:
    """Token ids for the tiny models: short, long, with a common prefix, repetitive."""
    numbers = random.Random(3)

    def some(count: int) -> list[int]:
        return [numbers.randrange(NUM_BYTES) for _ in range(count)]

    common, pattern = some(48), some(5)
    return [
        some(1),
        some(2),
        some(15),
        some(16),
        some(17),
        some(33),
        common,
        common + some(1),
        common + some(20),
        common[:32] + some(9),
        pattern * 8,
        pattern * 4 + some(3) + pattern,
        some(90),
        some(64),
    ]


def greedy_jobs(prompts: list[list[int]], num_tokens: int) -> list[Job]:
    """All prompts, greedy, to the full length."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [Job(prompt, params) for prompt in prompts]


def sampled_jobs(prompts: list[list[int]], num_tokens: int) -> list[Job]:
    """All prompts with seeds, sampled in one way after the other."""
    return [
        Job(
            prompt,
            SamplingParams(
                **SAMPLED[index % len(SAMPLED)],
                seed=2**40 + index,
                max_tokens=num_tokens,
                ignore_eos=True,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
