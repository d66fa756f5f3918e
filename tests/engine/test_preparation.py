"""Heavy start-up work of plugins: when the engine asks for it, and what follows from a refusal."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.errors import ConfigError, PluginContractError, PluginLoadError
from hotshoe.testing.plugins import make_distribution

# kernels and attention of hotshoe's own, ahead of all others under auto
PICKY = """
    from hotshoe.api import Component, PluginOptions, hookimpl
    import {original} as original

    REASONS = ["no soldering iron; buy one"]
    CAPABILITIES = original.hotshoe_component().capabilities
    asked = []

    class Options(PluginOptions):
        isa: str = "auto"

    def prepare(options):
        asked.append(options)
        return REASONS

    def build(options, context):
        assert asked, "built before it was prepared"
        return original.hotshoe_component().factory(PluginOptions(), context)

    @hookimpl
    def hotshoe_component():
        return Component(
            contract=original.hotshoe_component().contract,
            factory=build,
            options=Options,
            capabilities=CAPABILITIES,
            auto_priority=1000,
            prepare=prepare,
        )
"""
ORIGINALS = {"kernels": "hotshoe_kernels.torch", "attention": "hotshoe_attention.torch_sdpa"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

Answer = Callable[..., LLM]


@pytest.fixture
def picky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """hotshoe with one more plugin for kernels and for attention; their modules."""
    entry_points: dict[str, dict[str, str]] = {}
    for entry in importlib.metadata.distribution("hotshoe").entry_points:
        if entry.group.startswith("hotshoe."):
            entry_points.setdefault(entry.group, {})[entry.name] = entry.value
    for kind in ORIGINALS:
        entry_points[f"hotshoe.{kind}"] = {"picky": f"picky_{kind}", "torch": ORIGINALS[kind]}
    make_distribution(
        tmp_path / "site",
        "hotshoe",
        importlib.metadata.version("hotshoe"),
        modules={f"picky_{kind}": PICKY.format(original=ORIGINALS[kind]) for kind in ORIGINALS},
        entry_points=entry_points,
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield {kind: importlib.import_module(f"picky_{kind}") for kind in ORIGINALS}
    for kind in ORIGINALS:
        del sys.modules[f"picky_{kind}"]


@pytest.fixture
def start(tiny_path: Path) -> Answer:
    """An engine on the tiny model."""

    def start_one(**settings: object) -> LLM:
        return LLM(str(tiny_path), dtype="float32", max_model_len=64, max_num_seqs=2, **settings)

    return start_one


def test_auto_prepares_the_best_candidate_once_and_takes_it(
    picky: dict[str, ModuleType], start: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    for module in picky.values():
        module.REASONS = []  # type: ignore[attr-defined]  # a module made for this test
    with start(kernels={"options": {"isa": "sse9"}}) as llm:
        assert llm.components["kernels"].startswith("picky ")
        assert llm.components["attention"].startswith("picky ")
    assert [options.isa for options in picky["kernels"].asked] == ["sse9"]
    assert len(picky["attention"].asked) == 1
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_auto_goes_on_to_the_next_and_warns_once_for_one_reason(
    picky: dict[str, ModuleType], start: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    with start() as llm:
        assert llm.components["kernels"].startswith("torch ")
        assert llm.components["attention"].startswith("torch ")
        (output,) = llm.generate([[5, 6, 7]], GREEDY)
        assert len(output.outputs[0].token_ids) == 4
    assert len(picky["kernels"].asked) == len(picky["attention"].asked) == 1
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warnings == [
        "kernels=torch (auto: picky refused: no soldering iron; buy one)",
    ]


@pytest.mark.parametrize("section", ["kernels", "attention"])
def test_plugin_that_is_named_and_refuses_stops_the_start_with_the_remedy(
    picky: dict[str, ModuleType], start: Answer, section: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(**{section: "picky"})
    assert str(caught.value) == (
        f"{section}.name 'picky' can't be used: no soldering iron; buy one"
    )


def test_candidate_that_does_not_fit_anyway_is_not_prepared(
    picky: dict[str, ModuleType], start: Answer
) -> None:
    picky["kernels"].CAPABILITIES = None  # type: ignore[attr-defined]  # as above
    with start() as llm:
        assert llm.components["kernels"].startswith("torch ")
    assert picky["kernels"].asked == []


@pytest.mark.parametrize("answer", ["text is no list", None, [1]])
def test_answer_that_is_no_list_of_reasons_breaks_the_contract(
    picky: dict[str, ModuleType], start: Answer, answer: object
) -> None:
    picky["kernels"].REASONS = answer  # type: ignore[attr-defined]  # as above
    with pytest.raises(PluginContractError, match=r"from prepare\(options\); allowed: a list of"):
        start(kernels="picky")


def test_preparation_that_raises_is_blamed_on_the_plugin(
    picky: dict[str, ModuleType], start: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(picky["kernels"], "REASONS")
    with pytest.raises(PluginLoadError, match=r"(?s)'picky'.*failed in prepare:.*NameError"):
        start(kernels="picky")


WITHOUT_COMPILER = """
import json, sys
from hotshoe import LLM, SamplingParams

settings = {"max_model_len": 64, "max_num_seqs": 2, "dtype": "bfloat16"}
with LLM(sys.argv[1], **settings, **json.loads(sys.argv[2])) as llm:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
    print(llm.components["kernels"], llm.components["attention"])
"""


def run_without_compiler(tiny_path: Path, cache: Path, settings: str) -> tuple[int, str, str]:
    environment = {
        **os.environ,
        "PATH": str(cache),
        "XDG_CACHE_HOME": str(cache),
        "TMPDIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, str(tiny_path), settings],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_machine_without_a_compiler_answers_with_torch_and_says_once_what_to_install(
    tiny_path: Path, tmp_path: Path
) -> None:
    code, printed, logged = run_without_compiler(tiny_path, tmp_path, "{}")
    assert code == 0, logged
    assert printed.split()[0] == "torch"
    assert "torch_sdpa" in printed
    assert logged.count("no C++ compiler found; install g++") == 1
    assert "kernels=torch (auto: " in logged


def test_machine_without_a_compiler_refuses_native_kernels_by_name_with_the_remedy(
    tiny_path: Path, tmp_path: Path
) -> None:
    code, _, logged = run_without_compiler(tiny_path, tmp_path, '{"kernels": "cpu"}')
    assert code == 1
    assert "ConfigError: kernels.name 'cpu' can't be used: no C++ compiler found; install" in logged
