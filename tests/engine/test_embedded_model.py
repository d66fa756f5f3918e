"""The embedded model in a process of its own: memory while loading, imports, and an answer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOAD = """
import json, sys, torch, transformers
import hotshoe.entrypoints.llm
from hotshoe import LLM, SamplingParams

def megabytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(key))

before = megabytes("VmRSS:")
llm = LLM(dtype=sys.argv[1], max_model_len=1024)
peak = megabytes("VmHWM:") - before
answer = llm.chat(
    [{"role": "user", "content": "What is the capital of France?"}],
    SamplingParams(temperature=0, max_tokens=24),
)[0]
print(json.dumps({"peak": peak, "text": answer.text, "reason": answer.outputs[0].finish_reason}))
"""

NUM_PARAMETERS = 134_515_008
LARGEST_TENSOR = 49_152 * 576


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_loading_takes_little_more_than_the_weights_and_the_model_answers(
    dtype: str, size: int
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOAD, dtype], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(result.stdout.splitlines()[-1])
    megabyte = 1024**2
    weights, largest = NUM_PARAMETERS * size / megabyte, LARGEST_TENSOR * size / megabyte
    assert found["peak"] <= weights + largest + 100
    assert "Paris" in found["text"]
    assert found["reason"] == "stop"


@pytest.mark.parametrize("statement", ["import hotshoe", "import hotshoe.api, hotshoe.config"])
def test_light_imports_bring_no_torch(statement: str) -> None:
    heavy = "('torch', 'transformers')"
    code = f"{statement}; import sys; print([one for one in {heavy} if one in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
