"""With ``deterministic`` no way to run requests changes a token, in bfloat16 and int8 too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from golden.variations import NGRAM
from hotshoe import LLM, SamplingParams
from hotshoe.errors import ConfigError

NUMBERS = random.Random(11)
LENGTHS = [3, 17, 150, 1, 40, 64, 5, 90, 16, 33]
PROMPTS = [[NUMBERS.randrange(1000, 40_000) for _ in range(length)] for length in LENGTHS]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    if index % 2
    else SamplingParams(temperature=1.0, top_p=0.9, seed=index, max_tokens=16, ignore_eos=True)
    for index in range(len(PROMPTS))
]
VARIATIONS: dict[str, dict[str, Any]] = {
    "one_at_a_time": {"max_num_seqs": 1},
    "three_at_a_time": {"max_num_seqs": 3},
    "chunks_of_7": {"long_prefill_token_threshold": 7},
    "batches_of_48_tokens": {"max_num_batched_tokens": 48},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "preemption": {"cache": {"num_blocks": 24}, "max_model_len": 256},
    "drafts": {"spec_decode": NGRAM},
    "two_threads": {"kernels": {"name": "cpu", "options": {"num_threads": 2}}},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"quantization": "int8"},
    "gguf": {"quantization": "gguf"},
    "kv_int8": {"cache": {"dtype": "int8"}},
}


def tokens(settings: Mapping[str, Any]) -> list[list[int]]:
    """Output tokens of every prompt, twice: the second time from a warm prefix cache."""
    with LLM(
        **{"dtype": "bfloat16", "deterministic": True, "max_model_len": 512, **settings}
    ) as llm:
        rounds = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
    first, second = ([list(one.outputs[0].token_ids) for one in outputs] for outputs in rounds)
    assert first == second
    return first


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[list[int]]]:
    """Tokens by precision, from a run of all prompts together."""
    return cache(lambda precision: tokens(PRECISIONS[precision]))


def cases() -> Iterator[Any]:
    """Every variation; with quantized weights or pages most of them at full size only."""
    reduced = {
        "none": set(VARIATIONS),
        "int8": {"chunks_of_7", "drafts"},
        "gguf": {"chunks_of_7", "drafts"},
        "kv_int8": {"chunks_of_7", "drafts", "preemption"},
    }
    for precision in PRECISIONS:
        for name in VARIATIONS:
            marks = pytest.mark.slow if name in reduced[precision] else pytest.mark.full
            yield pytest.param(precision, name, marks=marks)


@pytest.mark.parametrize(("precision", "name"), list(cases()))
def test_tokens_depend_on_the_request_alone(
    precision: str, name: str, expected: Callable[[str], list[list[int]]]
) -> None:
    settings, variation = PRECISIONS[precision], VARIATIONS[name]
    pages = {**settings.get("cache", {}), **variation.get("cache", {})}
    found = tokens({**settings, **variation, "cache": pages})
    assert found == expected(precision)


@pytest.mark.parametrize("section", ["kernels", "attention"])
def test_parts_that_vary_with_the_batch_are_refused(section: str, tiny_path: Path) -> None:
    name = {"kernels": "torch", "attention": "torch_sdpa"}[section]
    with pytest.raises(ConfigError, match="vary with the batch"):
        LLM(str(tiny_path), deterministic=True, **{section: name})
