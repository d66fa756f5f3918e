"""What the engines on the GPU are asked, and how they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from golden.prompts import PLAIN, QUESTIONS
from hotshoe import LLM, RequestOutput, SamplingParams

PROMPTS = [prompt[:400] for prompt in [*PLAIN, *QUESTIONS]][:64]
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
SAMPLED = [
    SamplingParams(
        temperature=0.8,
        top_p=0.95 if index % 2 else 1.0,
        top_k=50 if index % 3 else 0,
        presence_penalty=0.5 if index % 5 == 0 else 0.0,
        seed=index,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    )
    for index in range(64)
]


class OpenLLM(Protocol):
    """Opens an engine on the tiny model, in float32 unless told otherwise."""

    def __call__(self, *, device: str = "cuda", **changes: Any) -> AbstractContextManager[LLM]: ...


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Of the first choices."""
    return [output.outputs[0].token_ids for output in outputs]
