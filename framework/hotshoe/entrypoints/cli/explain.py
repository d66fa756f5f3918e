"""Which plugin a configuration selects for each section, which it refuses, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hotshoe.api.contracts import KINDS
from hotshoe.config import EngineConfig, ResolvedConfig
from hotshoe.errors import HotshoeError
from hotshoe.plugin_options import validate_plugin_options
from hotshoe.plugins import PluginRegistry, RefusedPlugin
from hotshoe.server.parsers import ParserChoice, choose_parsers

if TYPE_CHECKING:
    from hotshoe.engine.resolution import Choice, Resolution


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of one section.

    Attributes:
        section: dotted path in the config.
        plugin: name of the plugin that fills it; None = nothing does.
        source: distribution and version of it.
        why: what led to it.
        refused: candidates that were refused, with the reason.
    """

    section: str
    plugin: str | None = None
    source: str = ""
    why: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def explain(resolved: ResolvedConfig) -> tuple[list[Explanation], HotshoeError | None]:
    """Choose every plugin as the engine would, without reading weights.

    Returns:
        One entry a section, and what would stop the engine; then the entries say what can be told
        of each section on its own, without the model.
    """
    # imports torch, which listing and showing plugins needn't wait for
    from hotshoe.engine.assemble import resolve

    try:
        resolution = resolve(resolved.config)
        return list(_explain_resolution(resolved, resolution)), None
    except HotshoeError as error:
        return list(explain_apart(resolved)), error


def _explain_resolution(resolved: ResolvedConfig, resolution: Resolution) -> Iterator[Explanation]:
    processors = [choice for choice, _ in resolution.processors]
    parsers = choose_parsers(resolved.config, resolution.chat_template)
    for section, selected, _ in _sections(resolved.config):
        if section in parsers and selected.name is not None:
            yield _explain_parser(resolved, section, selected.name, parsers[section])
            continue
        if section.endswith("]"):
            choice: Choice | None = processors.pop(0)
        else:
            choice = resolution.choices.get(section)
        if choice is None:
            yield _switched_off(resolved, section)
            continue
        refused = _reasons(resolution.refused.get(section, ()))
        why = _origin(resolved, section, selected.name)
        yield Explanation(section, choice.info.name, choice.info.source, why, refused)


def _explain_parser(
    resolved: ResolvedConfig, section: str, name: str, parser: ParserChoice
) -> Explanation:
    why = _origin(resolved, section, name) + (f"; {parser.why}" if parser.why else "")
    if parser.loaded is None:
        return Explanation(section, why=f"off, {why}")
    return Explanation(section, parser.loaded.info.name, parser.loaded.info.source, why)


def explain_apart(resolved: ResolvedConfig) -> Iterator[Explanation]:
    """What can be told of each section on its own, without the model; nothing is built."""
    settings = resolved.config.plugins
    registry = PluginRegistry(settings.allow, settings.deny, safe_mode=settings.safe_mode)
    for section, selected, kind in _sections(resolved.config):
        if selected.name is None:
            yield _switched_off(resolved, section)
            continue
        why = _origin(resolved, section, selected.name)
        if selected.name == "auto":
            candidates = registry.candidates(kind)
            refused = _reasons([one for one in candidates if isinstance(one, RefusedPlugin)])
            fitting = [one.info.name for one in candidates if one.info.name not in refused]
            why = f"{why}; undecided between {', '.join(fitting) or 'no candidates'}"
            yield Explanation(section, None, "", why, refused)
            continue
        try:
            loaded = registry.load(kind, selected.name)
            options = f"{section}.options"
            validate_plugin_options(loaded.component.options, selected.options, options)
        except HotshoeError as error:
            yield Explanation(section, None, "", why, {selected.name: str(error)})
        else:
            yield Explanation(section, selected.name, loaded.info.source, why)


def _sections(config: EngineConfig) -> Iterator[tuple[str, Any, str]]:
    """Path, value and plugin kind of each section that selects a plugin."""
    for kind in KINDS.values():
        section: Any = config
        for key in kind.section.split("."):
            section = getattr(section, key)
        if kind.is_list:
            for index, item in enumerate(section):
                yield f"{kind.section}[{index}]", item, kind.name
        else:
            yield kind.section, section, kind.name


def _switched_off(resolved: ResolvedConfig, section: str) -> Explanation:
    return Explanation(section, why=f"off, {_origin(resolved, section, None)}")


def _origin(resolved: ResolvedConfig, section: str, name: str | None) -> str:
    """What the config says, and where it says so."""
    given = f"{section}.name is {'none' if name is None else name}"
    path = section.partition("[")[0]
    origin = resolved.origins.get(f"{section}.name") or resolved.origins.get(path, "default")
    return f"{given} ({origin})"


def _reasons(refused: Sequence[RefusedPlugin]) -> dict[str, str]:
    return {one.info.name: "; ".join(one.reasons) for one in refused}
