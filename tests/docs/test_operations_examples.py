"""What operators copy: dashboard, alerts, service and proxy fit the server that they are for."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotshoe.config import load_config
from hotshoe.config.schema import ServerConfig
from hotshoe.entrypoints.cli.main import main
from hotshoe.metrics.catalog import METRICS, sample_names

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
EXPORTED = {name for metric in METRICS for name in sample_names(metric)}


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((EXAMPLES / "grafana" / "hotshoe.json").read_text())
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def expressions() -> list[str]:
    alerts = yaml.safe_load((EXAMPLES / "prometheus" / "alerts.yml").read_text())
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    return rules + [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def test_dashboard_and_alerts_ask_only_for_metrics_that_are_exported() -> None:
    asked = {name for one in expressions() for name in re.findall(r"hotshoe:(\w+)", one)}
    assert len(asked) > 25
    assert asked <= EXPORTED


def test_expressions_are_balanced_and_the_dashboards_are_about_one_model() -> None:
    for one in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert one.count(opening) == one.count(closing), one
    for panel in panels():
        for target in panel.get("targets", ()):
            if "hotshoe:" in target["expr"]:
                assert 'model_name="$model_name"' in target["expr"]


def test_percentiles_and_heatmaps_are_asked_of_histograms() -> None:
    kinds = {name: metric.kind for metric in METRICS for name in sample_names(metric)}
    for one in expressions():
        for name in re.findall(r"hotshoe:(\w+_bucket)", one):
            assert kinds[name] == "histogram"
        for name in re.findall(r"rate\(hotshoe:(\w+)", one):
            assert kinds[name] in ("counter", "histogram"), one


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    places = [panel["gridPos"] for panel in panels()]
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (one, other)


def test_the_pages_for_operators_name_only_what_exists() -> None:
    fields = set(ServerConfig.model_fields)
    for name in ("monitor", "deploy"):
        text = (REPOSITORY / "docs" / "how-to" / f"{name}.md").read_text()
        for metric in re.findall(r"`hotshoe:(\w+)`", text):
            assert metric in EXPORTED | {metric.name for metric in METRICS}
        assert set(re.findall(r"`server\.(\w+)", text)) <= fields
        for target in re.findall(r"\]\((\.\.?/?[^)#]+|\w+\.md)\)", text):
            assert (REPOSITORY / "docs" / "how-to" / target).exists(), target


def test_the_example_configuration_is_right_and_shown_in_the_docs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = EXAMPLES / "server.yaml"
    assert main(["config", "check", str(file)]) == 0
    page = (REPOSITORY / "docs" / "how-to" / "deploy.md").read_text()
    assert f"```yaml\n{file.read_text()}```" in page, "run make docs"
    assert load_config(file, env={}).config.server.served_model_name == ("smollm2",)


def test_the_service_waits_for_the_drain_and_signals_the_main_process_only() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    unit.read(EXAMPLES / "systemd" / "hotshoe.service")
    service = unit["Service"]
    # a SIGTERM to the engine core would end it in the middle of the drain
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > ServerConfig().drain_timeout_s
    assert service["Restart"] == "on-failure"
    assert int(service["LimitNOFILE"]) >= 16384


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_service(tmp_path: Path) -> None:
    text = (EXAMPLES / "systemd" / "hotshoe.service").read_text()
    unit = tmp_path / "hotshoe.service"
    # neither the program nor the user need to exist here
    text = text.replace("/opt/hotshoe/bin/hotshoe", "/bin/true")
    unit.write_text(re.sub(r"^(User|Group)=hotshoe$", r"\1=root", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hotshoe.service" not in done.stderr


def test_the_proxy_streams_and_agrees_with_the_servers_limits() -> None:
    text = (EXAMPLES / "nginx" / "hotshoe.conf").read_text()
    directives = dict(
        re.findall(
            r"^\s*(client_max_body_size|proxy_buffering|gzip|keepalive_timeout)\s+(\S+);",
            text,
            re.MULTILINE,
        )
    )
    assert directives["proxy_buffering"] == directives["gzip"] == "off"
    assert directives["client_max_body_size"] == f"{ServerConfig().max_body_mb:g}m"
    # the server closes idle connections after 30 s; nginx must do so first
    assert int(directives["keepalive_timeout"].removesuffix("s")) < 30
