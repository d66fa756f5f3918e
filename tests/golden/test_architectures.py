"""Every architecture through the whole engine: greedy output is that of ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from golden.checks import check_greedy
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import VARIATIONS
from golden.workloads import greedy_jobs, tiny_prompts
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = ARCHITECTURES[request.param]
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp(request.param),
        tiny_llama_config(**overrides),
        architecture=architecture,
    )


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle.folder(folder)


@pytest.mark.parametrize("name", ["no_prefix_cache", "prefix_cache", "everything"])
def test_greedy_output_equals_generate(
    name: str, folder: Path, oracle: Oracle, tally: Tally
) -> None:
    jobs = greedy_jobs(tiny_prompts(), 40)
    check_greedy(str(folder), oracle, VARIATIONS[name], jobs, tally)
