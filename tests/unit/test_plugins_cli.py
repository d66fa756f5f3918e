import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotshoe.entrypoints.cli.main import main
from hotshoe.testing.plugins import make_distribution

ACME = '''
    """Serves the [b]shortest[/b] job first."""

    from pydantic import Field

    from hotshoe.api import Component, PluginOptions, Scheduler, hookimpl

    class Options(PluginOptions):
        aging_s: float = Field(default=1.5, ge=0, description="Seconds until it's urgent.")
        needed: bool

    class Shortest(Scheduler):
        def schedule(self, step):
            pass

    @hookimpl
    def hotshoe_component():
        return Component(
            contract="scheduler/0",
            factory=lambda options, context: Shortest(),
            options=Options,
        )
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def install_one(distribution: str = "acme", *, source: str = ACME, name: str = "acme") -> None:
        folder = tmp_path / distribution
        module = f"cli_{distribution}"
        entry_points = {"hotshoe.schedulers": {name: module}}
        make_distribution(folder, distribution, modules={module: source}, entry_points=entry_points)
        monkeypatch.syspath_prepend(str(folder))

    yield install_one
    for name in [name for name in sys.modules if name.startswith("cli_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wide terminal; logging as it was before the command set it up."""
    monkeypatch.setenv("COLUMNS", "300")
    logger = logging.getLogger("hotshoe")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_list_shows_metadata_and_conflicts_without_importing(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("one", source="1 / 0")
    install("two", source="1 / 0")
    assert main(["plugins", "list", "schedulers"]) == 0
    shown = capsys.readouterr().out
    assert "fcfs" in shown
    assert (
        "schedulers/acme: conflict: offered by one 1.0 and two 1.0; it can't be selected" in shown
    )


def test_list_as_json_has_kind_name_distribution_and_version(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    assert main(["plugins", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {
        "kind": "schedulers",
        "name": "acme",
        "distribution": "acme",
        "version": "1.0",
    } in rows
    assert {row["kind"] for row in rows} >= {"attention", "models", "executors"}


def test_list_check_adds_contract_and_status_and_fails_on_a_broken_plugin(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    install("broken-dist", source="1 / 0", name="broken")
    assert main(["plugins", "list", "schedulers", "--check", "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["acme"]["status"] == rows["fcfs"]["status"] == "ok"
    assert rows["acme"]["contract"] == "scheduler/0"
    assert rows["broken"]["status"] == "error"
    assert "ZeroDivisionError" in rows["broken"]["reasons"][0]


def test_list_check_prints_the_reason_below_the_table(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken-dist", source="raise ImportError('no such device')", name="broken")
    assert main(["plugins", "list", "schedulers", "--check"]) == 1
    shown = capsys.readouterr().out
    assert "schedulers/broken: error: scheduler plugin 'broken' (broken-dist 1.0" in shown
    assert "ImportError: no such device" in shown


def test_show_prints_doc_options_and_capabilities(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    assert main(["plugins", "show", "schedulers/acme"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "schedulers/acme (acme 1.0, module cli_acme)"
    assert "contract scheduler/0" in lines
    assert "Serves the [b]shortest[/b] job first." in lines
    assert "aging_s a number >= 0 1.5 Seconds until it's urgent." in lines
    assert "needed true or false required" in lines
    assert "capabilities: none" in lines


def test_show_as_json_says_where_the_plugin_comes_from(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    assert main(["plugins", "show", "schedulers/acme", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["distribution"] == "acme"
    assert [option["name"] for option in shown["options"]] == ["aging_s", "needed"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["show", "fcfs"], 2, "error: got 'fcfs'; write KIND/NAME, as in 'schedulers/fcfs'"),
        (["show", "schedulers/fcfz"], 2, "(did you mean 'fcfs'?)"),
        (["show", "schedulers/broken"], 1, "ZeroDivisionError"),
        (["list", "schedulerz"], 2, "(did you mean 'schedulers'?)"),
        (["explode"], 2, "expected list, show or explain, got 'explode'"),
        ([], 2, "expected list, show or explain, none given"),
        (["list", "--chek"], 2, "--chek"),
    ],
)
def test_bad_input_is_one_message_and_an_exit_code(
    install: Install,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    code: int,
    message: str,
) -> None:
    install("broken-dist", source="1 / 0", name="broken")
    assert main(["plugins", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_help_describes_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--help"]) == 0
    assert "hotshoe plugins explain" in capsys.readouterr().out


def test_explain_says_what_fills_each_section_and_where_that_was_set(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    file = tmp_path / "server.yaml"
    file.write_text("scheduler: {name: acme, options: {needed: true}}\n")
    flags = ["--config", str(file), "--sampler", "standard", "--json"]
    assert main(["plugins", "explain", *flags]) == 0
    found = {one["section"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["scheduler"] == {
        "section": "scheduler",
        "plugin": "acme",
        "source": "acme 1.0",
        "why": f"scheduler.name is acme (file {file})",
        "refused": {},
    }
    assert found["sampler"]["why"] == "sampler.name is standard (cli --sampler)"
    assert found["spec_decode"]["plugin"] is None
    assert found["spec_decode"]["why"] == "off, spec_decode.name is none (default)"
    assert found["model"]["plugin"] == "llama"
    assert found["model"]["why"] == "model.name is auto (default)"


def test_explain_says_which_parsers_the_server_takes_by_the_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{# [TOOL_CALLS] #}")
    flags = ["--chat-template", str(template), "--server.reasoning-parser", "think_tags"]
    assert main(["plugins", "explain", *flags, "--json"]) == 0
    found = {one["section"]: one for one in json.loads(capsys.readouterr().out)}
    tools, reasoning = found["server.tool_parser"], found["server.reasoning_parser"]
    assert tools["plugin"] == "mistral"
    assert tools["why"].endswith("is auto (default); the chat template has '[TOOL_CALLS]'")
    assert reasoning["plugin"] == "think_tags"
    assert main(["plugins", "explain", "--server.tool-parser.name", "none", "--json"]) == 0
    found = {one["section"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["server.tool_parser"]["why"].startswith("off, server.tool_parser.name is none")
    reasoning = found["server.reasoning_parser"]
    assert reasoning["plugin"] is None
    assert reasoning["why"].endswith("is auto (default); the chat template has the marks of none")


def test_explain_prints_all_sections_before_the_error_that_stops_the_engine(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken-dist", source="1 / 0", name="broken")
    assert main(["plugins", "explain", "--scheduler", "broken"]) == 1
    captured = capsys.readouterr()
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert any(line.startswith("executor uniproc hotshoe") for line in lines)
    assert any(line.startswith("scheduler: broken refused: scheduler plugin") for line in lines)
    assert "undecided between triton, cpu, torch_sdpa" in " ".join(captured.out.split())
    assert "error: scheduler plugin 'broken'" in captured.err


def test_explain_in_safe_mode_refuses_other_distributions(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    assert main(["plugins", "explain", "--scheduler", "acme", "--safe-mode"]) == 2
    captured = capsys.readouterr()
    assert "is excluded: safe mode uses hotshoe's own plugins only" in captured.err
    assert "cli_acme" not in sys.modules
