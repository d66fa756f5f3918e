"""``hotshoe config``: show the resolved configuration, check a file, print schema and reference."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hotshoe.api.contracts import KINDS, PluginKind
from hotshoe.config import EngineConfig, ResolvedConfig
from hotshoe.config.help import format_value
from hotshoe.config.json_schema import config_json_schema
from hotshoe.config.reference import config_reference
from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments, quieten
from hotshoe.errors import ConfigError, HotshoeError
from hotshoe.plugin_options import validate_plugin_options
from hotshoe.plugins import PluginRegistry, discover, inspect_in_subprocess

_USAGE = """\
usage: hotshoe config show [--config FILE] [--json] [config flags]
       hotshoe config check FILE [config flags]
       hotshoe config schema
       hotshoe config reference

show       print every value, and where it came from
check      validate a file: values, plugins and their options, the model it names; loads no weights
schema     print the JSON schema of a config file, with the options of installed plugins
reference  print the reference of every field as Markdown"""


def run(argv: list[str]) -> int:
    """Run one of the actions and return the exit code."""
    actions = {"show": _show, "check": _check, "schema": _schema, "reference": _reference}
    if argv and argv[0] in actions:
        return actions[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    given = f"got {argv[0]!r}" if argv else "none given"
    raise config_error([f"hotshoe config: expected {', '.join(actions)}; {given}"])


def _show(argv: list[str]) -> int:
    parser = CommandParser("hotshoe config show", "Print every value and where it came from.")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    resolved, namespace = parse_engine_arguments(parser, argv)
    print(_as_json(resolved) if namespace.json else _as_table(resolved))
    return 0


def _as_json(resolved: ResolvedConfig) -> str:
    content = {
        "config": resolved.config.model_dump(mode="json"),
        "origins": resolved.origins,
        "notes": resolved.notes,
    }
    return json.dumps(content, indent=2)


def _as_table(resolved: ResolvedConfig) -> str:
    tree = resolved.config.model_dump()
    rows = [
        (path, format_value(_at(tree, path)), resolved.origins[path]) for path in _order(resolved)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for path, value, origin in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in resolved.notes)])


def _order(resolved: ResolvedConfig) -> list[str]:
    """Paths with each section together, in the order of the model."""
    sections = list(EngineConfig.model_fields)
    return sorted(resolved.origins, key=lambda path: sections.index(path.split(".")[0]))


def _at(tree: dict[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        value = value[key]
    return value


def _check(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe config check",
        "Check a config file as it would be used here, without loading weights.",
    )
    parser.add_argument("config", metavar="FILE", help="config file: YAML, TOML or JSON")
    resolved, namespace = parse_engine_arguments(parser, argv)
    quieten(resolved)
    problems = plugin_problems(resolved)
    if problems:
        raise config_error(problems)
    _check_model(resolved)
    print(f"{namespace.config}: ok")
    return 0


def _check_model(resolved: ResolvedConfig) -> None:
    """Put together all that the model's files decide, but its weights.

    Raises:
        HotshoeError: what would stop an engine.
    """
    # these import torch, which other actions needn't wait for
    from hotshoe.engine.assemble import resolve
    from hotshoe.weights.checkpoint import is_on_hub

    path = resolved.config.model.path
    if is_on_hub(path):
        print(f"note: model {path!r} is not on this machine; what it decides is not checked")
    else:
        resolve(resolved.config)


def plugin_problems(resolved: ResolvedConfig) -> list[str]:
    """What is wrong with the plugins that a config selects: names, contracts, options.

    Imports the selected plugins; builds none. Where a section says ``auto`` the choice needs the
    model, so nothing is known yet.
    """
    settings = resolved.config.plugins
    registry = PluginRegistry(settings.allow, settings.deny, safe_mode=settings.safe_mode)
    problems = []
    for kind, section, selected in selected_plugins(resolved.config):
        path = f"{section}.options"
        try:
            loaded = registry.load(kind.name, selected.name)
            validate_plugin_options(loaded.component.options, selected.options, path)
        except HotshoeError as error:
            # wrong options are a ConfigError, everything about the plugin itself isn't
            blamed = path if isinstance(error, ConfigError) else f"{section}.name"
            problems.append(f"{error}{_where(resolved, blamed, f'{section}.name')}")
    return problems


def _where(resolved: ResolvedConfig, *paths: str) -> str:
    """Where the first of these paths that anybody set was set, for the end of a message."""
    for path in paths:
        origins = {
            origin
            for one, origin in resolved.origins.items()
            if one == path or one.startswith(f"{path}.")
        } - {"default"}
        if origins:
            return f" ({path} from {', '.join(sorted(origins))})"
    return ""


def selected_plugins(config: EngineConfig) -> Iterator[tuple[PluginKind, str, Any]]:
    """Kind, section path and section of each plugin that the config names; not ``auto``."""
    for kind in KINDS.values():
        section: Any = config
        for key in kind.section.split("."):
            section = getattr(section, key)
        if kind.is_list:
            for index, item in enumerate(section):
                yield kind, f"{kind.section}[{index}]", item
        elif section.name not in (None, "auto"):
            yield kind, kind.section, section


def _schema(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe config schema", "Print the JSON schema of a config file, plugin options included."
    )
    parser.parse_args(argv)
    plugins = discover()
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = list(pool.map(inspect_in_subprocess, plugins))
    schemas: dict[str, Any] = {}
    for info, answer in zip(plugins, answers, strict=True):
        found = answer.get("options_schema", answer.get("error"))
        if isinstance(found, dict):
            schemas[info.key] = found
        else:
            print(f"warning: options of {info.key} are left open: {found}", file=sys.stderr)
    print(json.dumps(config_json_schema(schemas), indent=2))
    return 0


def _reference(argv: list[str]) -> int:
    parser = CommandParser(
        "hotshoe config reference", "Print the reference of every field as Markdown."
    )
    parser.parse_args(argv)
    print(config_reference(), end="")
    return 0
