"""``hotshoe plugins``: what is installed, what one plugin offers, and what a config selects."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotshoe.config.help import format_value
from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments, quieten
from hotshoe.entrypoints.cli.explain import explain
from hotshoe.errors import ConfigError, PluginError
from hotshoe.plugins import PluginInfo, PluginRegistry, discover, inspect_in_subprocess

_USAGE = """\
usage: hotshoe plugins list [KIND] [--check] [--json]
       hotshoe plugins show KIND/NAME [--json]
       hotshoe plugins explain [--config FILE] [--json] [config flags]

list     list installed plugins from metadata, importing none; --check imports each of them
show     show a plugin's options and capabilities
explain  show which plugins a configuration selects, which it refuses, and why"""

_NUM_PROBES = 4


def run(argv: list[str]) -> int:
    """Run one of the actions and return the exit code."""
    actions = {"list": _list, "show": _show, "explain": _explain}
    if argv and argv[0] in actions:
        return actions[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    given = f"got {argv[0]!r}" if argv else "none given"
    raise config_error([f"hotshoe plugins: expected list, show or explain, {given}"])


def _list(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe plugins list", "List installed plugins from metadata, importing none."
    )
    parser.add_argument("kind", nargs="?", help="only this kind, such as 'schedulers'")
    parser.add_argument(
        "--check",
        action="store_true",
        help="import each plugin in a process of its own; exit code 1 if any can't be loaded",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    arguments = parser.parse_args(argv)
    infos = discover(arguments.kind)
    rows = [_identify(info) for info in infos]
    if arguments.check:
        for row, result in zip(rows, _probe_all(infos), strict=True):
            row |= _summarise(result)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_list(rows, infos)
    return 1 if any(row.get("status") == "error" for row in rows) else 0


def _show(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe plugins show",
        "Show a plugin's options and capabilities. A process of its own imports it.",
    )
    parser.add_argument("plugin", metavar="KIND/NAME", help="for example 'schedulers/fcfs'")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    arguments = parser.parse_args(argv)
    kind, slash, name = arguments.plugin.partition("/")
    if not slash:
        raise ConfigError(f"got {kind!r}; write KIND/NAME, as in 'schedulers/fcfs'")
    info = PluginRegistry().find(kind, name)
    result = inspect_in_subprocess(info)
    if result["status"] == "error":
        raise PluginError(result["error"])
    if arguments.json:
        print(json.dumps(_identify(info) | result, indent=2))
    else:
        _print_plugin(info, result)
    return 0


def _explain(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe plugins explain",
        "Show which plugins a configuration selects, which it refuses, and why.",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    resolved, arguments = parse_engine_arguments(parser, argv)
    quieten(resolved)
    explanations, error = explain(resolved)
    if arguments.json:
        print(json.dumps([one.as_dict() for one in explanations], indent=2))
    else:
        console = _console()
        rows = [[one.section, one.plugin, one.source, one.why] for one in explanations]
        console.print(_table(["section", "plugin", "from", "why"], rows))
        for one in explanations:
            for name, reason in one.refused.items():
                console.print(f"\n{one.section}: {name} refused: {reason}")
        console.print()
    if error is not None:
        raise error
    return 0


def _identify(info: PluginInfo) -> dict[str, Any]:
    return {
        "kind": info.kind,
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
    }


def _probe_all(infos: Sequence[PluginInfo]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(_NUM_PROBES) as pool:
        return list(pool.map(inspect_in_subprocess, infos))


def _summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Contract and status of one plugin; ``reasons`` why it can't be loaded or can't work here."""
    if result["status"] == "error":
        return {"contract": None, "status": "error", "reasons": [result["error"]]}
    status = "unsupported" if result["unsupported"] else "ok"
    return {"contract": result["contract"], "status": status, "reasons": result["unsupported"]}


def _print_list(rows: Sequence[dict[str, Any]], infos: Sequence[PluginInfo]) -> None:
    columns = [key for key in rows[0] if key != "reasons"] if rows else ["kind", "name"]
    console = _console()
    console.print(_table(columns, ([row[key] for key in columns] for row in rows)))
    for row in rows:
        for reason in row.get("reasons", ()):
            console.print(f"\n{row['kind']}/{row['name']}: {row['status']}: {reason}")
    for key, count in Counter(info.key for info in infos).items():
        if count > 1:
            sources = " and ".join(info.source for info in infos if info.key == key)
            console.print(f"\n{key}: conflict: offered by {sources}; it can't be selected")


def _print_plugin(info: PluginInfo, result: dict[str, Any]) -> None:
    console = _console()
    experimental = ", experimental" if result["is_experimental"] else ""
    console.print(f"{info.key} ({info.source}, module {info.module})")
    console.print(f"contract {result['contract']}{experimental}")
    if result["doc"]:
        console.print("\n" + result["doc"].replace("``", ""))
    console.print("\noptions" if result["options"] else "\noptions: none")
    if result["options"]:
        columns = ["name", "allowed", "default", "description"]
        console.print(_table(columns, map(_option_row, result["options"])))
    capabilities = result["capabilities"]
    console.print("\ncapabilities" if capabilities else "\ncapabilities: none")
    if isinstance(capabilities, dict):
        for name, value in capabilities.items():
            console.print(f"  {name}: {format_value(value)}")
    elif capabilities:
        console.print(f"  {capabilities}")
    for reason in result["unsupported"]:
        console.print(f"\ncan't work here: {reason}")


def _option_row(option: dict[str, Any]) -> list[str]:
    default = "required" if option["required"] else format_value(option["default"])
    return [option["name"], option["allowed"], default, option["description"]]


def _table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text, as what plugins say is no markup
        table.add_row(*(Text(format_value(cell)) for cell in row))
    return table


def _console() -> Console:
    return Console(markup=False, highlight=False, soft_wrap=True)
