"""Which plugin fills which place, and why: from a config to choices, before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotshoe.api import KINDS, Component
from hotshoe.config import EngineConfig
from hotshoe.errors import ConfigError, ModelLoadError
from hotshoe.plugins import LoadedPlugin, PluginInfo, PluginRegistry, RefusedPlugin

logger = logging.getLogger(__name__)

AUTO = "auto"
Check = Callable[[LoadedPlugin], list[str]]

KIND_OF_SECTION = {kind.section: kind.name for kind in KINDS.values()} | {
    "spec_decode.quantization": "quantization"
}
"""Plugin kind by config section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What fills one place.

    Attributes:
        loaded: the plugin; None if an instance was handed in.
        instance: the object, if one was handed in.
        options: raw values of ``<section>.options``.
        reason: why this one, such as ``configured`` or ``auto: the first that fits``.
    """

    section: str
    info: PluginInfo
    loaded: LoadedPlugin | None
    instance: object | None
    options: Mapping[str, Any]
    reason: str

    @property
    def component(self) -> Component | None:
        """What the plugin says about itself; None for an instance."""
        return self.loaded.component if self.loaded else None


@dataclass(slots=True)
class Resolution:
    """All choices of one engine, by config section, and what ``auto`` refused on the way.

    Attributes:
        chat_template: of the tokenizer, which decides about parsers; None if it has none, and in an
            engine that is built.
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    refused: dict[str, list[RefusedPlugin]] = field(default_factory=dict)
    processors: list[tuple[Choice, bool]] = field(default_factory=list)
    other_backends: list[Choice] = field(default_factory=list)
    chat_template: str | None = None

    def components(self) -> dict[str, str]:
        """Chosen plugin and its source by section, for people to read."""
        found = {section: choice.info for section, choice in self.choices.items()}
        listed = {section: f"{info.name} ({info.source})" for section, info in found.items()}
        if self.processors:
            names = ", ".join(choice.info.name for choice, _ in self.processors)
            listed["sampler.logits_processors"] = names
        if self.other_backends:
            names = ", ".join(f"{one.info.name} ({one.info.source})" for one in self.other_backends)
            listed["guided_decoding.others"] = names
        return listed


class Resolver:
    """Makes the choices of a config, one section at a time.

    Args:
        config: names and options.
        registry: loads the plugins.
        instances: ready-made objects by section; they take the place of what the config names.
    """

    def __init__(
        self, config: EngineConfig, registry: PluginRegistry, instances: Mapping[str, object]
    ) -> None:
        self.config = config
        self.registry = registry
        self.resolution = Resolution()
        self._instances = dict(instances)
        self._reported: set[tuple[str, ...]] = set()
        unknown = set(instances) - set(KIND_OF_SECTION)
        if unknown:
            raise ConfigError(
                f"no component can be handed in for {sorted(unknown)}; allowed: "
                f"{sorted(KIND_OF_SECTION)}"
            )

    def choose(
        self, section: str, check: Check | None = None, *, trial: Check | None = None
    ) -> Choice | None:
        """Fill one place. Reasons against a candidate come from ``check``, then from the plugin's
        own ``prepare``, then from ``trial``; those of one end the search for more. Under ``auto``
        the next candidate is tried; a plugin that was asked for by name is refused with them.

        Args:
            section: dotted config path.
            check: what can be told from the component.
            trial: what takes the plugin's object to tell.

        Returns:
            The choice, or None if the section's name is none.

        Raises:
            ConfigError: if the named plugin doesn't fit, or no candidate does.
        """
        if section in self._instances:
            choice = self.handed_in(section, self._instances[section])
        else:
            selected = _section(self.config, section)
            if selected.name is None:
                return None
            choice = self.selected(section, selected.name, selected.options, check, trial=trial)
        self.resolution.choices[section] = choice
        return choice

    def selected(
        self,
        section: str,
        name: str,
        options: Mapping[str, Any],
        check: Check | None = None,
        *,
        trial: Check | None = None,
    ) -> Choice:
        """The plugin of that name, prepared; under ``auto`` the best that fits.

        Raises:
            PluginError: if the named one can't be loaded.
            ConfigError: with the reasons against it, or against every candidate.
        """
        if name == AUTO:
            return self._pick(section, options, check, trial)
        return self.named(section, name, options, check, trial=trial)

    def named(
        self,
        section: str,
        name: str,
        options: Mapping[str, Any],
        check: Check | None = None,
        *,
        trial: Check | None = None,
    ) -> Choice:
        """The plugin of that name, prepared.

        Raises:
            PluginError: if it can't be loaded.
            ConfigError: with the reasons against it.
        """
        loaded = self.registry.load(KIND_OF_SECTION[section], name)
        reasons = check(loaded) if check else []
        reasons = reasons or self.registry.prepare(loaded, options, section=section)
        reasons = reasons or (trial(loaded) if trial else [])
        if reasons:
            raise ConfigError(f"{section}.name {name!r} can't be used: {'; '.join(reasons)}")
        return _choice(section, loaded, options, "configured")

    def handed_in(self, section: str, instance: object) -> Choice:
        """A ready-made object.

        Raises:
            PluginContractError: if it doesn't implement the interface of its kind.
        """
        return Choice(
            section=section,
            info=self.registry.adopt(KIND_OF_SECTION[section], instance),
            loaded=None,
            instance=instance,
            options={},
            reason="handed in",
        )

    def choose_processors(self) -> None:
        """Load the logits processors of ``sampler.logits_processors``."""
        section = "sampler.logits_processors"
        for entry in self.config.sampler.logits_processors:
            loaded = self.registry.load("logits_processors", entry.name)
            if reasons := self.registry.prepare(loaded, entry.options, section=section):
                raise ConfigError(f"{section} {entry.name!r} can't be used: {'; '.join(reasons)}")
            choice = _choice(section, loaded, entry.options, "configured")
            self.resolution.processors.append((choice, entry.apply == "always"))

    def build(self, choice: Choice, context: object) -> Any:
        """The object that fills a place."""
        if choice.loaded is None:
            return choice.instance
        section = choice.section
        return self.registry.build(choice.loaded, choice.options, context, section=section)

    def _pick(
        self,
        section: str,
        options: Mapping[str, Any],
        check: Check | None,
        trial: Check | None,
    ) -> Choice:
        kind = KIND_OF_SECTION[section]
        refused = self.resolution.refused.setdefault(section, [])
        unprepared: set[tuple[str, ...]] = set()
        for candidate in self.registry.candidates(kind):
            if isinstance(candidate, RefusedPlugin):
                refused.append(candidate)
                continue
            reasons = check(candidate) if check else []
            if not reasons:
                reasons = self.registry.prepare(candidate, options, section=section)
                unprepared |= {tuple(reasons)} if reasons else set()
            reasons = reasons or (trial(candidate) if trial else [])
            if not reasons:
                why = f"auto: {', '.join(_explain(one) for one in refused)}" if refused else AUTO
                logger.log(self._level(unprepared), "%s=%s (%s)", section, candidate.info.name, why)
                self.registry.activate(candidate)
                return _choice(section, candidate, options, why)
            refused.append(RefusedPlugin(candidate.info, tuple(reasons)))
        listed = "; ".join(_explain(one) for one in refused) or "none is installed"
        message = f"no {kind} plugin fits: {listed}{self._others(section, kind)}"
        if section == "model":
            raise ModelLoadError(message)
        raise ConfigError(f"{section}.name auto: {message}")

    def _level(self, unprepared: set[tuple[str, ...]]) -> int:
        """A warning if a better candidate would work once its reasons are dealt with; one warning
        for the same reasons in several sections.
        """
        news = unprepared - self._reported
        self._reported |= news
        return logging.WARNING if news else logging.INFO

    def _others(self, section: str, kind: str) -> str:
        """What is installed but never taken unasked, for the end of a message."""
        others = [info for info in self.registry.installed(kind) if not info.is_builtin]
        if not others:
            return ""
        listed = ", ".join(f"{info.name} ({info.source})" for info in others)
        return f"; auto takes no other package's plugin: set {section}.name to use {listed}"


def _choice(section: str, loaded: LoadedPlugin, options: Mapping[str, Any], reason: str) -> Choice:
    return Choice(
        section=section,
        info=loaded.info,
        loaded=loaded,
        instance=None,
        options=options,
        reason=reason,
    )


def reasons_against(what: str, wanted: Iterable[str], offered: Iterable[str]) -> list[str]:
    """A reason if something that is wanted isn't offered."""
    known = list(offered)
    lacking = [one for one in wanted if one not in known]
    if not lacking:
        return []
    listed = ", ".join(map(repr, lacking))
    claim = f"{what} {listed} is" if len(lacking) == 1 else f"{what}s {listed} are"
    return [f"{claim} not supported (it has {', '.join(known)})"]


def _explain(refused: RefusedPlugin) -> str:
    return f"{refused.info.name} refused: {'; '.join(refused.reasons)}"


def _section(config: EngineConfig, path: str) -> Any:
    found: Any = config
    for part in path.split("."):
        found = getattr(found, part)
    return found
