"""What a plugin module says about itself: ``Component`` and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class PluginOptions(BaseModel):
    """Base of a plugin's options: validated from ``<section>.options``, frozen, unknown keys
    refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The answer to the ``hotshoe_component`` hook: everything the loader needs before it builds
    anything.

    Attributes:
        contract: contract and version that the plugin was written for, such as ``"scheduler/0"``.
        factory: called as ``factory(options, context)`` with the validated options and the
            context record of its kind (``SchedulerContext``, ``AttentionContext``, ...). Heavy
            imports belong inside it.
        options: model of ``<section>.options``.
        capabilities: data that the core may ask before building (``AttentionCapabilities``,
            ``ModelCapabilities``, ...).
        unsupported: why the component can't work on this machine at all; empty = it can.
        auto_priority: built-ins above 0 are candidates where the config says ``auto``, the
            highest first. Ignored for third-party packages: installing one never changes what runs.
        prepare: heavy start-up work that depends on the machine, such as compiling, called as
            ``prepare(options)`` with the validated options. Returns why the component can't work
            here, each reason with its remedy; empty = ready. It's called before the factory, for
            the plugin that the config names, or for a candidate of ``auto`` against which nothing
            else speaks; reasons stop the start-up of the former, and ``auto`` goes on to the next
            candidate, with a warning. Called again, also in another process, it must be quick.
        diagnose: facts about that work for people to read (``hotshoe doctor``), called as
            ``diagnose(options)``: what would be used, where it's kept, whether it's done. Two keys
            have a meaning: ``problem`` says why the component can't work here and what to do, and
            ``pending`` what ``prepare`` has yet to do. Must be quick and change nothing.
    """

    contract: str
    factory: Callable[[Any, Any], object]
    options: type[PluginOptions] = PluginOptions
    capabilities: object | None = None
    unsupported: tuple[str, ...] = ()
    auto_priority: int = 0
    prepare: Callable[[Any], Sequence[str]] | None = None
    diagnose: Callable[[Any], Mapping[str, str]] | None = None
