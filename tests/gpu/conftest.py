"""Tests that need an NVIDIA GPU. Where there is none, each is skipped, and says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.workload import GREEDY, PROMPTS, SAMPLED, OpenLLM, token_ids
from hotshoe import LLM, RequestOutput

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Every test of this folder is for a GPU."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup() -> None:
    """Not by a marker: the summary then has one line for all of them."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch finds none that it can use")


@pytest.fixture(scope="session")
def open_llm(tiny_path: Path) -> OpenLLM:
    def open_one(*, device: str = "cuda", **changes: Any) -> LLM:
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 64}
        if device == "cpu":
            settings |= {"kernels": "torch", "attention": "torch_sdpa", "sampler": "standard"}
        return LLM(str(tiny_path), device=device, **(settings | changes))

    return open_one


@pytest.fixture(scope="session")
def greedy_on_cpu(open_llm: OpenLLM) -> list[RequestOutput]:
    """What the reference says to each prompt, with the two most likely tokens at each place."""
    with open_llm(device="cpu") as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.fixture(scope="session")
def sampled_on_cpu(open_llm: OpenLLM) -> list[list[int]]:
    """Tokens that the reference draws."""
    with open_llm(device="cpu") as llm:
        return token_ids(llm.generate(PROMPTS, SAMPLED))


@pytest.fixture(scope="module")
def gpu_llm(open_llm: OpenLLM) -> Iterator[LLM]:
    """An engine as ``auto`` makes it."""
    with open_llm() as llm:
        yield llm
