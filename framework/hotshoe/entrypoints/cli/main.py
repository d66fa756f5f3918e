"""The ``hotshoe`` command: picks a subcommand, and turns errors into one message and an exit code.

A subcommand is a module in this package with ``run(argv: list[str]) -> int``, which gets the
arguments after its name and returns the exit code, and one line in ``COMMANDS``. It is imported
only when it is invoked. It reads its arguments with ``CommandParser``; if it starts an engine, with
``parse_engine_arguments``, which adds ``--config`` and every config flag (both in
``engine_arguments``). It raises errors of the ``HotshoeError`` tree and never prints them.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hotshoe import __version__
from hotshoe.errors import (
    ConfigError,
    HotshoeError,
    KVCacheError,
    ModelLoadError,
    PluginConflictError,
    PluginDeniedError,
    PluginNotFoundError,
    RequestError,
    TrainingError,
)

BAD_INPUT = (
    ConfigError,
    KVCacheError,
    ModelLoadError,
    RequestError,
    PluginNotFoundError,
    PluginConflictError,
    PluginDeniedError,
    TrainingError,
)
"""Errors that the caller can put right on the command line or in a file; exit code 2, not 1."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module that runs it, and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "generate": Command("hotshoe.entrypoints.cli.generate", "complete prompts"),
    "chat": Command("hotshoe.entrypoints.cli.chat", "talk to the model"),
    "demo": Command("hotshoe.entrypoints.cli.demo", "answer a question and show what ran"),
    "bench": Command("hotshoe.entrypoints.cli.bench", "measure throughput and latency"),
    "serve": Command(
        "hotshoe.entrypoints.cli.serve", "serve a model over an OpenAI-compatible API"
    ),
    "run-batch": Command("hotshoe.entrypoints.cli.run_batch", "answer a file of requests"),
    "train-drafter": Command(
        "hotshoe.entrypoints.cli.train_drafter", "train a draft head for a model"
    ),
    "config": Command(
        "hotshoe.entrypoints.cli.config", "show, check or describe the configuration"
    ),
    "kernels": Command(
        "hotshoe.entrypoints.cli.kernels", "compile what plugins compile at first use"
    ),
    "doctor": Command(
        "hotshoe.entrypoints.cli.doctor", "find out what slows this machine down, and what to do"
    ),
    "plugins": Command("hotshoe.entrypoints.cli.plugins", "list and inspect installed plugins"),
    "collect-env": Command(
        "hotshoe.entrypoints.cli.collect_env", "describe this machine for a report of a problem"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, 1 (failed), 2 (bad input) or 130 (interrupted).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a model may write what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader of a pipe has left, as head does; the interpreter must not flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except HotshoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BAD_INPUT) else 1
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"hotshoe {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        raise ConfigError(_unknown(arguments[0]))
    code: int = importlib.import_module(command.module).run(arguments[1:])
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(
        f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()
    )
    return (
        "usage: hotshoe [--help] [--version] COMMAND ...\n\n"
        "An LLM inference and serving engine in which every hot part is a plugin.\n\n"
        f"commands:\n{listed}\n\n"
        "hotshoe COMMAND --help describes a command."
    )


def _unknown(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown command {name!r}; commands: {', '.join(COMMANDS)}{hint}"


if __name__ == "__main__":
    sys.exit(main())
