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
dtype, quantization = sys.argv[1:]
llm = LLM(dtype=dtype, quantization=quantization, max_model_len=1024)
peak = megabytes("VmHWM:") - before
answer = llm.chat(
    [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
    SamplingParams(temperature=0, max_tokens=64),
)[0]
print(json.dumps({"peak": peak, "text": answer.text, "reason": answer.outputs[0].finish_reason}))
"""

NUM_PARAMETERS = 134_515_008
LARGEST_TENSOR = 49_152 * 576


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization", "size", "size_of_largest"),
    [
        ("float32", "none", 4, 4),
        ("bfloat16", "none", 2, 2),
        ("bfloat16", "int8", 1.07, 4),  # which is read as float32
        ("bfloat16", "gguf", 0.73, 1.07),
    ],
)
def test_loading_takes_little_more_than_the_weights_and_the_model_answers(
    dtype: str, quantization: str, size: float, size_of_largest: float
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOAD, dtype, quantization],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    megabyte = 1024**2
    weights, largest = NUM_PARAMETERS * size / megabyte, LARGEST_TENSOR * size_of_largest / megabyte
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
