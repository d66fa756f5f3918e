"""The hotshoe command, as a process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotshoe import __version__
from hotshoe.config import load_config
from hotshoe.config.reference import config_reference
from hotshoe.entrypoints.cli.config import plugin_problems
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.main import main
from hotshoe.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Commands set up the log of the process; in a test that must end with the test."""
    logger = logging.getLogger("hotshoe")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def hotshoe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotshoe.entrypoints.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["config", "show"], ["config", "show", "--help"]]
)
def test_help_and_config_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom hotshoe.entrypoints.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "sys.exit('imported' if {'torch', 'transformers'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_version_and_help_are_printed() -> None:
    assert hotshoe("--version").stdout == f"hotshoe {__version__}\n"
    shown = hotshoe("--help")
    assert shown.returncode == 0
    assert "config" in shown.stdout
    assert hotshoe().returncode == 2


def test_errors_are_one_line_on_stderr_with_exit_code_2() -> None:
    done = hotshoe("config", "show", "--max-num-seq", "1=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert "did you mean '--max-num-seqs'?" in done.stderr
    assert "Traceback" not in done.stderr
    unknown = hotshoe("confg")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: unknown command 'confg'; commands: generate, chat")
    assert "(did you mean 'config'?)" in unknown.stderr
    assert unknown.stderr.count("\n") == 1


def test_show_prints_values_with_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("scheduler: {name: priority, options: {aging: 1}}\ncache: {block_size: 32}\n")
    done = hotshoe(
        "config", "show", "--config", str(file), "--scheduler", "fcfs", "--json", HOTSHOE_SEED="5"
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["config"]["cache"]["block_size"] == 32
    assert shown["config"]["scheduler"]["options"] == {}
    assert shown["origins"]["cache.block_size"] == f"file {file}"
    assert shown["origins"]["scheduler.name"] == "cli --scheduler"
    assert shown["origins"]["seed"] == "env HOTSHOE_SEED"
    assert "scheduler.options.aging" in shown["notes"][0]
    assert "scheduler.options.aging" in done.stderr
    table = hotshoe("config", "show", "--config", str(file)).stdout
    assert ["scheduler.options.aging", "1", "file", str(file)] in [
        line.split() for line in table.splitlines()
    ]


def test_check_names_unknown_plugins_and_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("scheduler: prioritty\ncache: {eviction: {options: {depht: 1}}}\n")
    done = hotshoe("config", "check", str(file))
    assert done.returncode == 2
    assert "no scheduler plugin named 'prioritty'" in done.stderr
    assert "did you mean 'priority'?" in done.stderr
    assert f"(scheduler.name from file {file})" in done.stderr
    assert "cache.eviction.options.depht" in done.stderr


def test_check_accepts_a_right_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[cache]\nblock_size = 32\neviction = "lru"\n')
    done = hotshoe("config", "check", str(file))
    assert (done.returncode, done.stdout) == (0, f"{file}: ok\n"), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("model: {path: ./nowhere}", "model './nowhere': no such file or folder"),
        ("model: {max_model_len: 1000000}", "max_model_len is 1000000 but the model was trained"),
        ("model: {tokenizer: ./nowhere}", "./nowhere"),
        ("model: {chat_template: ./nowhere}", "can't read chat template './nowhere'"),
        ("attention: {options: {x: 1}}", "attention.options.x: unknown option"),
        ("cache: {memory_gb: 0.001}", "can't hold one request"),
        (
            "spec_decode: {name: eagle, options: {model: ./nowhere}}",
            "drafter of spec_decode: model './nowhere': no such file or folder",
        ),
    ],
)
def test_check_sees_what_only_the_model_tells(
    settings: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(settings)
    assert main(["config", "check", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_check_says_that_it_does_not_fetch_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: acme/llama-7b\n")
    assert main(["config", "check", str(file)]) == 0
    assert "note: model 'acme/llama-7b' is not on this machine" in capsys.readouterr().out


def test_the_default_config_selects_only_installed_plugins() -> None:
    assert plugin_problems(load_config(env={})) == []


def test_schema_holds_the_options_of_installed_plugins() -> None:
    done = hotshoe("config", "schema")
    assert done.returncode == 0, done.stderr
    schema = json.loads(done.stdout)
    assert schema["additionalProperties"] is False
    names = [
        rule["if"]["properties"]["name"]["const"]
        for rule in schema["$defs"]["SchedulerConfig"]["allOf"]
    ]
    assert "fcfs" in names
    assert {"type": "string", "minLength": 1, "description": "short for model.path"} in schema[
        "properties"
    ]["model"]["anyOf"]


def test_the_committed_reference_is_up_to_date() -> None:
    committed = (REPOSITORY / "docs" / "reference" / "config.md").read_text()
    assert committed == config_reference(), "run make docs"


def test_engine_flags_are_told_apart_from_the_arguments_of_a_command() -> None:
    parser = CommandParser("hotshoe test", "A test.")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int)
    resolved, own = parse_engine_arguments(
        parser,
        ["--model", "folder", "hello", "--enable-prefix-caching", "--max-tokens", "3", "--seed=2"],
        env={},
    )
    assert (own.prompt, own.max_tokens, own.config) == ("hello", 3, None)
    assert (resolved.config.model.path, resolved.config.seed) == ("folder", 2)


def test_a_misspelt_flag_of_a_command_gets_the_closest_match() -> None:
    parser = CommandParser("hotshoe test", "A test.")
    parser.add_argument("--max-tokens", type=int)
    with pytest.raises(
        ConfigError, match=r"unknown flag --max-token \(did you mean '--max-tokens'"
    ):
        parse_engine_arguments(parser, ["--max-token", "3"], env={})


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "nope"]) == 2
    assert capsys.readouterr().err.startswith("error: hotshoe config: expected show, check")
