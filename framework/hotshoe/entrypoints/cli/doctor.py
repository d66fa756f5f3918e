"""``hotshoe doctor``: what this machine offers, what ``auto`` makes of it, and what would help."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotshoe import __version__
from hotshoe.api.contracts import KINDS
from hotshoe.bench.machine import describe_machine
from hotshoe.config import ResolvedConfig
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.explain import Explanation, explain, explain_apart
from hotshoe.errors import HotshoeError
from hotshoe.plugins import LoadedPlugin, PluginRegistry, RefusedPlugin

PROBLEM = "problem"
PENDING = "pending"
"""Keys of what ``Component.diagnose`` returns that have a meaning."""

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        facts: about the machine and torch, in the order in which they're shown.
        plugins: what plugins tell about their heavy start-up work, by plugin.
        components: what fills each section, and why.
        problems: what is wrong, each with its remedy.
        notes: what could be better.
    """

    facts: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, dict[str, str]] = field(default_factory=dict)
    components: list[Explanation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(argv: list[str]) -> int:
    """Print the report; the exit code is 1 if it has problems."""
    parser = CommandParser(
        "hotshoe doctor",
        "Show what this machine offers, which plugins a configuration selects here and why, and "
        "what to do about it. Compiles nothing. Exit code 1 if something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    resolved, arguments = parse_engine_arguments(parser, argv)
    if resolved.origins["log_level"] == "default":
        # the report says all that warnings would
        logging.getLogger("hotshoe").setLevel(logging.ERROR)
    report = examine(resolved)
    print(json.dumps(asdict(report), indent=2) if arguments.json else "\n".join(_text(report)))
    return 1 if report.problems else 0


def examine(resolved: ResolvedConfig) -> Report:
    """Look at the machine and at what a configuration makes of it."""
    report = Report()
    _examine_machine(report)
    _examine_plugins(report, resolved)
    _examine_components(report, resolved)
    return report


def _examine_machine(report: Report) -> None:
    import torch

    machine = describe_machine()
    huge_pages = _selected(_HUGE_PAGES)
    num_threads, num_cores = machine["num_threads"], machine["num_cores"]
    available_gb = _available_memory_gb()
    report.facts |= {
        "hotshoe": __version__,
        "cpu": f"{machine['cpu']}, {num_cores} usable cores",
        "memory": f"{available_gb:.1f} of {machine['memory_gb']:.1f} GiB available",
        "transparent huge pages": huge_pages,
        "torch": f"{torch.__version__}, {num_threads} threads",
        "gpu": machine["gpu"] or "none",
    }
    if machine["gpu"]:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        report.facts["gpu memory"] = (
            f"{free_bytes / 1024**3:.1f} of {total_bytes / 1024**3:.1f} GiB free"
        )
    if num_threads > num_cores:
        report.notes.append(
            f"torch runs {num_threads} threads on {num_cores} usable cores; "
            f"set OMP_NUM_THREADS={num_cores}"
        )
    if huge_pages == "never":
        report.notes.append(
            "transparent huge pages are off, which slows down reading weights; as root: "
            f"echo madvise > {_HUGE_PAGES}"
        )


def _examine_plugins(report: Report, resolved: ResolvedConfig) -> None:
    """Ask the plugins that the configuration names, and the candidates of ``auto``."""
    plugins = resolved.config.plugins
    registry = PluginRegistry(plugins.allow, plugins.deny, safe_mode=plugins.safe_mode)
    for loaded, section, options in _selectable(resolved, registry):
        key = loaded.info.key
        try:
            facts = registry.diagnose(loaded, options, section=section)
        except HotshoeError as error:
            facts = {PROBLEM: str(error)}
        if not facts:
            continue
        report.plugins[key] = facts
        note = f"{facts.get(PENDING)}; the first engine does it, or now: hotshoe kernels build"
        if PENDING in facts and note not in report.notes:
            report.notes.append(note)


def _selectable(
    resolved: ResolvedConfig, registry: PluginRegistry
) -> Iterator[tuple[LoadedPlugin, str, Mapping[str, Any]]]:
    for kind in KINDS.values():
        if kind.is_list:
            continue
        section: Any = resolved.config
        for key in kind.section.split("."):
            section = getattr(section, key)
        if section.name == "auto":
            for candidate in registry.candidates(kind.name):
                if not isinstance(candidate, RefusedPlugin):
                    yield candidate, kind.section, section.options
        elif section.name is not None:
            try:
                yield registry.load(kind.name, section.name), kind.section, section.options
            except HotshoeError:
                continue  # the components say so


def _examine_components(report: Report, resolved: ResolvedConfig) -> None:
    """What is chosen and what stands in the way; without compiling, so as far as that can be told.

    A problem of a plugin that wouldn't be taken anyway, such as one for another device, is none.
    """
    problems = {facts[PROBLEM]: None for facts in report.plugins.values() if PROBLEM in facts}
    if any(PENDING in facts and PROBLEM not in facts for facts in report.plugins.values()):
        report.components = list(explain_apart(resolved))
        report.problems += problems
        return
    report.components, error = explain(resolved)
    refusals = [reason for one in report.components for reason in one.refused.values()]
    told = [*refusals, str(error or "")]
    report.problems += [one for one in problems if any(one in text for text in told)]
    if error is not None and not any(one in str(error) for one in report.problems):
        report.problems.append(str(error))


def _selected(path: Path) -> str:
    """The choice in brackets, as in ``always [madvise] never``."""
    try:
        text = path.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _available_memory_gb() -> float:
    from hotshoe.kv_cache.sizing import available_memory_bytes

    return available_memory_bytes() / 1024**3


def _text(report: Report) -> Iterator[str]:
    yield from _aligned(report.facts)
    for keys, facts in _grouped(report.plugins):
        yield f"\n{', '.join(keys)}"
        yield from _aligned({name: value for name, value in facts.items() if name != PROBLEM})
    yield "\nplugins of this configuration"
    yield from _aligned({one.section: _choice(one) for one in report.components})
    refusals = {
        f"{one.section}: {name} refused: {_last_line(reason)}": None
        for one in report.components
        for name, reason in one.refused.items()
    }
    yield from ([""] if refusals else [])
    yield from refusals
    yield ""
    yield from (f"note: {note}" for note in report.notes)
    yield from (f"problem: {problem}" for problem in report.problems)
    if not report.problems:
        yield "no problems found"


def _choice(one: Explanation) -> str:
    return f"{one.plugin} ({one.why})" if one.plugin else one.why


def _last_line(reason: str) -> str:
    return reason.strip().splitlines()[-1] if reason.strip() else ""


def _grouped(
    plugins: Mapping[str, dict[str, str]],
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Plugins that tell the same, together."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for key, facts in plugins.items():
        same = next((keys for keys, others in groups if others == facts), None)
        if same is None:
            groups.append(([key], facts))
        else:
            same.append(key)
    yield from groups


def _aligned(entries: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, entries), default=0)
    for name, value in entries.items():
        yield f"  {name:<{width}}  {value}"
