"""pluggy markers and every hook. Hooks build things at start-up or observe; nothing in the step
loop's inner path is a hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from hotshoe.api.component import Component

if TYPE_CHECKING:
    from hotshoe.api.types import FinishedRequest, StepRecord

PROJECT = "hotshoe"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hotshoe_component() -> Component:  # type: ignore[empty-body]  # a hookspec has no body
    """Describe the component this module provides: contract version, factory, options model,
    capabilities.

    Called once per process that needs the component, right after import, before any device is
    touched. Only the plugin that the configuration selects is asked, through its own module alone.
    The factory is called later with the validated options and the context record of its kind.

    Returns:
        The description. A module that can't work here says so through ``Component.unsupported``.

    Raises:
        Nothing; what it raises all the same stops the start-up with the plugin's name and
        distribution.
    """


@hookspec
def hotshoe_engine_started(components: dict[str, str]) -> None:
    """The engine is assembled and can take requests.

    Called once per engine, in the engine process, on every loaded plugin module that implements it.

    Args:
        components: chosen plugin and its distribution by config section, such as
            ``{"scheduler": "fcfs (hotshoe 0.1.0)"}``.

    Raises:
        Nothing; an exception is logged with the plugin's name and goes no further.
    """


@hookspec
def hotshoe_step_committed(record: StepRecord) -> None:
    """A step has committed.

    Called in the engine process after each step on every loaded plugin module that implements it;
    it delays the next step by as long as it takes. May not touch the engine.

    Args:
        record: what ran, how long each stage took.

    Raises:
        Nothing; an exception is logged once per plugin and goes no further.
    """


@hookspec
def hotshoe_request_finished(request: FinishedRequest) -> None:
    """A request has ended: finished, aborted or failed.

    Called in the engine process, after its blocks are freed or marked to be freed.

    Args:
        request: lengths, reason and times.

    Raises:
        Nothing; an exception is logged once per plugin and goes no further.
    """


def create_plugin_manager() -> Any:
    """A pluggy manager that knows these hooks and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    import sys

    manager.add_hookspecs(sys.modules[__name__])
    return manager
