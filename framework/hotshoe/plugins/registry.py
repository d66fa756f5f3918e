"""The plugins that one process uses: what may be imported, what was, and what was built from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotshoe.api.component import Component
from hotshoe.config.paths import did_you_mean
from hotshoe.errors import (
    PluginConflictError,
    PluginContractError,
    PluginDeniedError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from hotshoe.log import log_as_plugin
from hotshoe.plugin_options import validate_plugin_options
from hotshoe.plugins.checks import (
    ask_component,
    call_diagnose,
    call_factory,
    call_prepare,
    check_interface,
    import_plugin,
)
from hotshoe.plugins.discovery import (
    BUILTIN_DISTRIBUTION,
    INSTANCE_DISTRIBUTION,
    PluginInfo,
    discover,
    find_kind,
    normalise,
)
from hotshoe.plugins.observers import Observers

if TYPE_CHECKING:
    from hotshoe.api.types import FinishedRequest, StepRecord


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPlugin:
    """An imported plugin whose contract version was accepted.

    Attributes:
        module: what the entry point names: a module, or an object inside one.
    """

    info: PluginInfo
    component: Component
    module: object


@dataclass(frozen=True, slots=True)
class RefusedPlugin:
    """A candidate of ``auto`` that can't be used, and why."""

    info: PluginInfo
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class PluginIdentity:
    """What two processes must agree on about one plugin. Plain data, safe to send."""

    kind: str
    name: str
    distribution: str
    version: str
    contract: str


class PluginRegistry:
    """Loads plugins by kind and name, builds their objects, and calls their observer hooks.

    Args:
        allow: third-party distributions that may be imported; None = all. hotshoe's own plugins
            need not be listed.
        deny: distributions that may not be imported, listed in ``allow`` or not.
        safe_mode: whether only hotshoe's own plugins may be imported.
    """

    def __init__(
        self,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] = (),
        *,
        safe_mode: bool = False,
    ) -> None:
        self._allow = None if allow is None else {normalise(name) for name in allow}
        self._deny = {normalise(name) for name in deny}
        self._safe_mode = safe_mode
        self._installed: dict[str, list[PluginInfo]] = {}
        self._described: dict[PluginInfo, LoadedPlugin] = {}
        self._active: dict[str, LoadedPlugin] = {}
        self._observers = Observers()

    def installed(self, kind: str) -> list[PluginInfo]:
        """Plugins of a kind, denied ones too; read from metadata once per registry."""
        if kind not in self._installed:
            self._installed[kind] = discover(kind)
        return self._installed[kind]

    def builtins(self, kind: str) -> list[PluginInfo]:
        """Plugins of a kind that hotshoe itself ships."""
        return [info for info in self.installed(kind) if info.is_builtin]

    def find(self, kind: str, name: str) -> PluginInfo:
        """The one plugin of that kind and name that may be used; imports nothing.

        Raises:
            PluginNotFoundError: lists what is installed, and the closest match.
            PluginDeniedError: if allow, deny or safe mode exclude it.
            PluginConflictError: if several offer the name.
        """
        offers = [info for info in self.installed(kind) if info.name == name]
        if not offers:
            raise PluginNotFoundError(self._describe_unknown(kind, name))
        denials = {info: self.denial(info) for info in offers}
        allowed = [info for info in offers if not denials[info]]
        if not allowed:
            why = "; ".join(f"{info.label} {denials[info]}" for info in offers)
            raise PluginDeniedError(why)
        if len(allowed) > 1:
            listed = " and ".join(f"{info.source} (module {info.module!r})" for info in allowed)
            raise PluginConflictError(
                f"{find_kind(kind).contract} plugin {name!r} is offered by {listed}; "
                f"uninstall one, or exclude its distribution with plugins.deny"
            )
        return allowed[0]

    def denial(self, info: PluginInfo) -> str | None:
        """Why a plugin may not be imported; None = it may."""
        distribution = normalise(info.distribution)
        if distribution in self._deny:
            return f"is excluded: plugins.deny has {info.distribution!r}"
        if distribution == BUILTIN_DISTRIBUTION:
            return None
        if self._safe_mode:
            return "is excluded: safe mode uses hotshoe's own plugins only"
        if self._allow is not None and distribution not in self._allow:
            return f"is excluded: plugins.allow has only {sorted(self._allow)!r}"
        return None

    def load(self, kind: str, name: str) -> LoadedPlugin:
        """Import a plugin and accept its component. From here on its observer hooks are called.

        Raises:
            PluginError: of the kind that says what is wrong (see ``hotshoe.errors``).
        """
        info = self.find(kind, name)
        loaded = self._describe(info)
        if loaded.component.unsupported:
            reasons = "; ".join(loaded.component.unsupported)
            raise PluginLoadError(f"{info.label} can't work here: {reasons}")
        self.activate(loaded)
        return loaded

    def activate(self, loaded: LoadedPlugin) -> None:
        """Count a plugin as used: its observer hooks are called, it logs as hotshoe does, and the
        fingerprint has it.

        Raises:
            PluginContractError: if another name stands for the same module.
        """
        key = loaded.info.key
        if key in self._active:
            return
        for other in self._active.values():
            if other.module is loaded.module:
                raise PluginContractError(
                    f"{loaded.info.label} is the same object as {other.info.key}; "
                    f"give each name a module of its own"
                )
        log_as_plugin(loaded.info.module)
        self._observers.add(key, loaded.module)
        self._active[key] = loaded

    def retain(self, keys: Collection[str]) -> None:
        """Count only these plugins (``kind/name``) as used; the hooks of others fall silent."""
        for key in [key for key in self._active if key not in keys]:
            del self._active[key]
            self._observers.remove(key)

    def candidates(self, kind: str) -> list[LoadedPlugin | RefusedPlugin]:
        """What ``auto`` may choose from: hotshoe's own plugins with a positive priority.

        The highest priority comes first; what can't be imported comes last, as it has none. The
        one that is picked is to be passed to ``activate``.
        """
        ranked: list[tuple[int, LoadedPlugin | RefusedPlugin]] = []
        for info in self.builtins(kind):
            if why := self.denial(info):
                ranked.append((0, RefusedPlugin(info, (why,))))
                continue
            try:
                loaded = self._describe(info)
            except PluginError as error:
                ranked.append((0, RefusedPlugin(info, (str(error),))))
                continue
            component = loaded.component
            if component.auto_priority > 0:
                refused = RefusedPlugin(info, component.unsupported)
                ranked.append((component.auto_priority, refused if refused.reasons else loaded))
        ranked.sort(key=lambda pair: -pair[0])
        return [candidate for _, candidate in ranked]

    def prepare(
        self, loaded: LoadedPlugin, raw_options: Mapping[str, Any], *, section: str
    ) -> list[str]:
        """Let a plugin do its heavy start-up work before it's built; see ``Component.prepare``.

        Args:
            loaded: from ``load`` or ``candidates``.
            raw_options: values of ``<section>.options``.
            section: dotted path of the config section, for messages.

        Returns:
            Why it can't work here; empty = it's ready.

        Raises:
            ConfigError: if an option is unknown or wrong.
            PluginError: if the plugin's function fails, or answers something else.
        """
        component = loaded.component
        if component.prepare is None:
            return []
        options = validate_plugin_options(component.options, raw_options, f"{section}.options")
        return call_prepare(loaded.info, component, options)

    def diagnose(
        self, loaded: LoadedPlugin, raw_options: Mapping[str, Any], *, section: str
    ) -> dict[str, str]:
        """What a plugin tells about that work, without doing it; see ``Component.diagnose``.

        Raises:
            ConfigError: if an option is unknown or wrong.
            PluginError: if the plugin's function fails, or answers something else.
        """
        component = loaded.component
        options = validate_plugin_options(component.options, raw_options, f"{section}.options")
        return call_diagnose(loaded.info, component, options)

    def build(
        self,
        loaded: LoadedPlugin,
        raw_options: Mapping[str, Any],
        context: object,
        *,
        section: str,
    ) -> Any:
        """Validate the options, call the factory and check what it built.

        Args:
            loaded: from ``load`` or ``candidates``.
            raw_options: values of ``<section>.options``.
            context: the context record of its kind, such as ``SchedulerContext``.
            section: dotted path of the config section, for messages.

        Returns:
            An instance of the interface of the plugin's kind (typed Any: callers annotate it).

        Raises:
            ConfigError: if an option is unknown or wrong.
            PluginLoadError: if the factory raises something else than a ``HotshoeError``.
            PluginContractError: if the result doesn't implement the interface.
        """
        options = validate_plugin_options(
            loaded.component.options, raw_options, f"{section}.options"
        )
        return call_factory(loaded.info, loaded.component, options, context)

    def adopt(self, kind: str, instance: object) -> PluginInfo:
        """Accept an object that was passed in ready made, instead of a plugin's.

        Returns:
            What to report: its class's name, from the distribution ``instance``.

        Raises:
            PluginContractError: if it doesn't implement the interface of the kind.
        """
        find_kind(kind)
        cls = instance if isinstance(instance, type) else type(instance)
        info = PluginInfo(
            kind, cls.__name__, INSTANCE_DISTRIBUTION, "", f"{cls.__module__}:{cls.__qualname__}"
        )
        check_interface(info, instance)
        return info

    def notify_started(self, components: dict[str, str]) -> None:
        """Call ``hotshoe_engine_started`` of every active plugin."""
        self._observers.notify("hotshoe_engine_started", components=components)

    def notify_step(self, record: StepRecord) -> None:
        """Call ``hotshoe_step_committed`` of every active plugin."""
        self._observers.notify("hotshoe_step_committed", record=record)

    def notify_finished(self, request: FinishedRequest) -> None:
        """Call ``hotshoe_request_finished`` of every active plugin."""
        self._observers.notify("hotshoe_request_finished", request=request)

    def is_observed(self, hook: str) -> bool:
        """Whether an active plugin implements this observer hook; if none does, its record need not
        be made.
        """
        return self._observers.has(hook)

    def fingerprint(self) -> tuple[PluginIdentity, ...]:
        """What this process uses, sorted, for its children to verify."""
        return tuple(sorted(_identity(loaded) for loaded in self._active.values()))

    def verify(
        self, expected: Collection[PluginIdentity], *, kinds: Collection[str] | None = None
    ) -> None:
        """Check that this process uses the plugins that its parent does.

        Args:
            expected: the parent's ``fingerprint()``.
            kinds: compare only these; None = all.

        Raises:
            PluginError: lists every difference.
        """
        theirs = {(one.kind, one.name): one for one in expected}
        ours = {(one.kind, one.name): one for one in self.fingerprint()}
        keys = sorted(
            key for key in theirs.keys() | ours.keys() if kinds is None or key[0] in kinds
        )
        differences = [
            f"{'/'.join(key)}: parent has {_show(theirs.get(key))}, this process has "
            f"{_show(ours.get(key))}"
            for key in keys
            if theirs.get(key) != ours.get(key)
        ]
        if differences:
            raise PluginError(
                f"plugins differ from the parent process: {'; '.join(differences)}; "
                f"install the same versions for both"
            )

    def _describe(self, info: PluginInfo) -> LoadedPlugin:
        if info not in self._described:
            module = import_plugin(info)
            self._described[info] = LoadedPlugin(info, ask_component(info, module), module)
        return self._described[info]

    def _describe_unknown(self, kind: str, name: str) -> str:
        installed = self.installed(kind)
        listed = ", ".join(f"{info.name} ({info.source})" for info in installed) or "none"
        hint = did_you_mean(name, [info.name for info in installed])
        return f"no {find_kind(kind).contract} plugin named {name!r}; installed: {listed}{hint}"


def _identity(loaded: LoadedPlugin) -> PluginIdentity:
    info = loaded.info
    return PluginIdentity(
        info.kind, info.name, info.distribution, info.version, loaded.component.contract
    )


def _show(identity: PluginIdentity | None) -> str:
    if identity is None:
        return "none"
    return f"{identity.distribution} {identity.version} ({identity.contract})"
