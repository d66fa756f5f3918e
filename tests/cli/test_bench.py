"""hotshoe bench, and its workloads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hotshoe import LLM
from hotshoe.api import CompiledGrammar, Grammar, GrammarSpec, GuidedDecodingBackend
from hotshoe.bench.measure import measure
from hotshoe.bench.workloads import WORKLOADS, Shape
from hotshoe.entrypoints.cli.main import main
from hotshoe.testing.models import IM_END, tiny_llama_config, write_tiny_checkpoint

Spread = {"median": float, "p90": float}
FIGURES: dict[str, Any] = {
    "elapsed_s": float,
    "num_prompt_tokens": int,
    "num_cached_tokens": int,
    "num_output_tokens": int,
    "output_tokens_per_s": float,
    "total_tokens_per_s": float,
    "requests_per_s": float,
    "ttft_ms": Spread,
    "tpot_ms": Spread,
    "inter_token_ms": Spread,
    "num_preemptions": int,
    "num_draft_tokens": int,
    "num_accepted_tokens": int,
    "num_steps": int,
    "max_running": int,
    "step_ms": dict.fromkeys(
        ["plan", "commit", "prepare", "forward", "sample", "draft", "total"], float
    ),
    "foreign_cpu_share": float,
}
RESULT: dict[str, Any] = {
    "workload": dict,
    "time": str,
    "command": str,
    "machine": dict,
    "versions": dict,
    "config": dict,
    "components": dict,
    "load_time_s": float,
    "read_bandwidth_gb_per_s": float,
    "peak_memory_mb": float,
    "median": dict,
    "repetitions": list,
}


def assert_shape(value: Any, shape: Any) -> None:
    """Exactly these keys, all the way down, with values of these types."""
    if isinstance(shape, dict):
        assert value.keys() == shape.keys()
        for key, inner in shape.items():
            assert_shape(value[key], inner)
    else:
        assert type(value) is shape


def test_throughput_results_say_what_was_run_where_and_how_it_went(
    model_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    argv = [
        *("throughput", "--num-prompts", "3", "--input-len", "5:9", "--output-len", "4"),
        *("--repetitions", "2", "--json", "--output", str(path), *model_flags),
    ]
    assert main(["bench", *argv]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == result
    assert_shape(result, RESULT)
    assert result["workload"] == {
        "name": "throughput",
        "num_prompts": 3,
        "input_len": [5, 9],
        "output_len": 4,
        "seed": 0,
    }
    assert result["command"] == " ".join(["hotshoe", "bench", *argv])
    assert result["machine"]["num_cores"] >= 1
    assert result["versions"].keys() >= {"python", "torch", "transformers", "hotshoe"}
    assert result["config"]["model"]["path"] == model_flags[1]
    assert result["components"]["scheduler"].startswith("fcfs")
    assert len(result["repetitions"]) == 2
    for figures in result["repetitions"]:
        assert_shape(figures, FIGURES)
        assert figures["num_output_tokens"] == 12
        assert 15 <= figures["num_prompt_tokens"] <= 27
        assert figures["num_cached_tokens"] == 0
        assert figures["max_running"] == 3
    assert result["median"].keys() == FIGURES.keys()


def test_results_are_printed_for_people_part_by_part(
    model_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "2", "--output-len", "2", "--repetitions", "1"]
    assert main(["bench", "prefix", "--input-len", "64", *flags, *model_flags]) == 0
    shown = capsys.readouterr().out
    assert "prefix num_prompts=2 shared_len=64 own_len=32 output_len=2 seed=0" in shown
    cached = next(line for line in shown.splitlines() if line.startswith("cached prompt tokens"))
    _, cold, warm = cached.rsplit(maxsplit=2)
    assert int(cold) < int(warm)
    assert "scheduler=fcfs" in shown


def test_workloads_are_the_same_each_time_and_change_with_the_seed(llm: LLM) -> None:
    special = llm.tokenizer.special_token_ids
    for name, make in WORKLOADS.items():
        one, again = (make(llm.tokenizer, Shape()) for _ in range(2))
        assert one == again
        assert one.name == name
        if name not in ("copy", "structured"):
            assert make(llm.tokenizer, Shape(seed=1)).prompts != one.prompts
            assert not special & {token for prompt in one.prompts for token in prompt}
    throughput = WORKLOADS["throughput"](llm.tokenizer, Shape())
    assert len(throughput.prompts) == 32
    assert all(32 <= len(prompt) <= 256 for prompt in throughput.prompts)
    assert throughput.max_tokens == 128
    prefix = WORKLOADS["prefix"](llm.tokenizer, Shape())
    assert len({tuple(prompt[:1024]) for prompt in prefix.prompts}) == 1
    assert len({tuple(prompt) for prompt in prefix.prompts}) == 16
    structured = WORKLOADS["structured"](llm.tokenizer, Shape())
    assert {len(members) for members in structured.parts.values()} == {1, 16}
    assert structured.constraints.keys() == {"json x 1", "json x 16", "regex x 1", "regex x 16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latncy"], "argument workload: invalid choice: 'latncy'"),
        (["latency", "--num-prompts", "0"], "argument --num-prompts: got '0', allowed: 1 or more"),
        (["latency", "--input-len", "9:3"], "got '9:3', allowed: MIN:MAX with MIN <= MAX"),
        (["all", "--input-len", "9"], "the copy workload has a prompt of its own"),
        (
            ["structured", "--guided-decoding", "none"],
            "none is selected; installed: guided_decoding plug",
        ),
        (["latency", "--output", "/nowhere/at-all.json"], "can't write '/nowhere/at-all.json'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert message in shown


class SpelledGrammar(Grammar):
    """Nothing but ``ab``."""

    def __init__(self) -> None:
        self._length = 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        allowed = self.validate(token_ids) == len(token_ids)
        self._length += len(token_ids) if allowed else 0
        return allowed

    def validate(self, token_ids: Sequence[int]) -> int:
        left = [*b"ab", IM_END][self._length :]
        return sum(
            1
            for _ in takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, left, strict=False))
        )

    def rollback(self, num_tokens: int) -> None:
        self._length -= num_tokens

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        bitmask[row] = 0
        word, bit = divmod([*b"ab", IM_END][self._length], 32)
        bitmask[row, word] = 1 << bit

    @property
    def is_terminated(self) -> bool:
        return self._length >= 2


class SpelledCompiled(CompiledGrammar):
    """Spells it to one request."""

    def matcher(self) -> Grammar:
        return SpelledGrammar()


class SpellingBackend(GuidedDecodingBackend):
    """Takes every constraint for the same one."""

    def unsupported(self, spec: GrammarSpec) -> list[str]:
        return []

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return SpelledCompiled()


def test_structured_output_is_measured_free_and_constrained(tiny_path: Path) -> None:
    shape = Shape(num_prompts=2, output_len=5)
    with LLM(str(tiny_path), dtype="float32", guided_decoding=SpellingBackend()) as llm:
        workload = WORKLOADS["structured"](llm.tokenizer, shape)
        (figures,) = measure(llm, workload, repetitions=1)
    counts = {part: found["num_output_tokens"] for part, found in figures.items()}
    # two letters and the end of the output
    constrained = {"json x 1": 3, "json x 2": 6, "regex x 1": 3, "regex x 2": 6}
    assert counts == {"free x 1": 5, "free x 2": 10, **constrained}


def test_structured_output_is_left_out_of_all_with_a_word_about_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_checkpoint(tmp_path, tiny_llama_config(max_position_embeddings=2048))
    sizes = ["--num-prompts", "1", "--output-len", "2", "--repetitions", "1"]
    model = ["--model", str(path), "--dtype", "float32", "--guided-decoding", "none"]
    assert main(["bench", "all", *sizes, *model, "--json"]) == 0
    shown = capsys.readouterr()
    names = [result["workload"]["name"] for result in json.loads(shown.out)]
    assert names == ["throughput", "latency", "prefill", "prefix", "copy"]
    assert "left out: the structured workload needs a guided-decoding backend" in shown.err


def test_the_demo_answers_and_names_the_plugins(
    model_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "hello?", *model_flags]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("> hello?\n")
    assert re.search(r"^  scheduler +fcfs \(hotshoe ", shown, re.MULTILINE)
    assert "tokens/s" in shown.splitlines()[-1]
