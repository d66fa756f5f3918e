"""Which plugins are installed, from metadata of distributions alone: no plugin code runs here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from hotshoe.api.contracts import KINDS, PluginKind
from hotshoe.config.paths import did_you_mean
from hotshoe.errors import PluginNotFoundError

BUILTIN_DISTRIBUTION = "hotshoe"
INSTANCE_DISTRIBUTION = "instance"
"""Stands for the distribution of an object that was passed in ready made."""


@dataclass(frozen=True, slots=True, order=True)
class PluginInfo:
    """One installed plugin as its distribution advertises it.

    Attributes:
        kind: plural name, a key of ``KINDS``.
        name: the value users write in the config.
        distribution: name of the distribution that offers it.
        version: of that distribution.
        module: where it lives, ``package.module`` or ``package.module:attribute``.
    """

    kind: str
    name: str
    distribution: str
    version: str
    module: str

    @property
    def key(self) -> str:
        """``kind/name``, as it's registered with pluggy and shown to users."""
        return f"{self.kind}/{self.name}"

    @property
    def source(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def is_builtin(self) -> bool:
        """Whether hotshoe itself ships it."""
        return normalise(self.distribution) == BUILTIN_DISTRIBUTION

    @property
    def label(self) -> str:
        """Start of every message about this plugin: kind, name and where it comes from."""
        contract = KINDS[self.kind].contract
        return f"{contract} plugin {self.name!r} ({self.source}, module {self.module!r})"


def normalise(distribution: str) -> str:
    """A distribution name in the form in which two spellings of it are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def find_kind(kind: str) -> PluginKind:
    """The kind of that plural name.

    Raises:
        PluginNotFoundError: if there is none; the message lists all.
    """
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise PluginNotFoundError(f"no plugin kind named {kind!r}; kinds: {', '.join(KINDS)}{hint}")
    return KINDS[kind]


def discover(kind: str | None = None) -> list[PluginInfo]:
    """Every installed plugin of a kind (None = of all kinds), sorted; imports none of them.

    A distribution that is visible twice on ``sys.path`` counts once. Two distributions that offer
    one name are both listed.

    Raises:
        PluginNotFoundError: if ``kind`` isn't a kind.
    """
    kinds = [find_kind(kind)] if kind is not None else list(KINDS.values())
    found = {
        (info.kind, info.name, normalise(info.distribution), info.module): info
        for one in kinds
        for info in (_read(one, entry) for entry in entry_points(group=one.group))
    }
    return sorted(found.values())


def _read(kind: PluginKind, entry: EntryPoint) -> PluginInfo:
    name, version = "unknown", ""
    # leftovers of a broken uninstall have no METADATA; listing the others must go on
    if entry.dist is not None and entry.dist.metadata is not None:
        name = entry.dist.metadata["Name"] or "unknown"
        version = entry.dist.metadata["Version"] or ""
    return PluginInfo(kind.name, entry.name, name, version, entry.value.strip())
