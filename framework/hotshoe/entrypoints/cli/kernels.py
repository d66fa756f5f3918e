"""``hotshoe kernels``: do now what plugins would do at first use, such as compiling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser
from hotshoe.errors import ConfigError
from hotshoe.plugins import PluginInfo, discover, inspect_in_subprocess, prepare_in_subprocess

_USAGE = """\
usage: hotshoe kernels build [--isa ISA]

build  let every installed plugin that compiles something at first use do so now"""

_NUM_PROBES = 4


def run(argv: list[str]) -> int:
    """Run one of the actions and return the exit code."""
    if argv and argv[0] == "build":
        return _build(argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    given = f"got {argv[0]!r}" if argv else "none given"
    raise config_error([f"hotshoe kernels: expected build, {given}"])


def _build(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe kernels build",
        "Let every installed plugin that compiles something at first use do so now. "
        "Exit code 1 if one can't.",
    )
    parser.add_argument(
        "--isa", help="instruction set, for plugins with an option of that name; default: auto"
    )
    isa = parser.parse_args(argv).isa
    options = {} if isa is None else {"isa": isa}
    chosen = list(_plugins_to_prepare(options))
    if not chosen and options:
        raise ConfigError("no installed plugin that prepares anything has the option 'isa'")
    if not chosen:
        print("no installed plugin has anything to prepare")
    width = max((len(info.key) for info, _ in chosen), default=0)
    failed = False
    for info, obstacle in chosen:
        if obstacle:
            print(f"{info.key:<{width}}  skipped: {obstacle}")
            continue
        start = time.monotonic()
        reasons = prepare_in_subprocess(info, options)
        failed = failed or bool(reasons)
        result = f"failed: {'; '.join(reasons)}" if reasons else "ready"
        print(f"{info.key:<{width}}  {result} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed else 0


def _plugins_to_prepare(options: dict[str, str]) -> Iterator[tuple[PluginInfo, str]]:
    """Plugins that have heavy start-up work and these options, with what rules it out here; also
    those that can't be imported, as nobody can tell what they would do.
    """
    infos = discover()
    with ThreadPoolExecutor(_NUM_PROBES) as pool:
        answers: list[dict[str, Any]] = list(pool.map(inspect_in_subprocess, infos))
    for info, answer in zip(infos, answers, strict=True):
        if answer["status"] == "error":
            yield info, answer["error"].splitlines()[-1]
        elif answer["prepares"]:
            names = {option["name"] for option in answer["options"]}
            if names.issuperset(options):
                yield info, "; ".join(answer["unsupported"])
