"""Calls the observer hooks of active plugins, each on its own, so that one can't harm another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hotshoe.api.hooks import create_plugin_manager

logger = logging.getLogger(__name__)

OBSERVER_HOOKS = (
    "hotshoe_engine_started",
    "hotshoe_step_committed",
    "hotshoe_request_finished",
)


class Observers:
    """Modules registered with pluggy under ``kind/name``, and their observer hooks."""

    def __init__(self) -> None:
        self._manager = create_plugin_manager()
        self._modules: dict[str, object] = {}
        self._callers: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        self._failed: set[tuple[str, str]] = set()

    def add(self, key: str, module: object) -> None:
        """Register a module; its hooks are called from now on.

        Raises:
            ValueError: if it's registered under another key already.
            pluggy.PluginValidationError: if it implements an unknown hook or argument.
        """
        self._manager.register(module, name=key)
        self._manager.check_pending()
        self._modules[key] = module
        self._find_callers()

    def remove(self, key: str) -> None:
        """Forget a module; its hooks are not called any more."""
        self._manager.unregister(name=key)
        del self._modules[key]
        self._find_callers()

    def has(self, hook: str) -> bool:
        """Whether anybody implements the hook."""
        return hook in self._callers

    def notify(self, hook: str, **arguments: object) -> None:
        """Call a hook on each module that implements it; log a module's first failure only."""
        for key, call in self._callers.get(hook, ()):
            try:
                call(**arguments)
            except Exception:
                if (key, hook) not in self._failed:
                    self._failed.add((key, hook))
                    logger.exception(
                        "%s of plugin %s failed; it's called again, but further failures of it "
                        "are not logged",
                        hook,
                        key,
                    )

    def _find_callers(self) -> None:
        self._callers = {hook: callers for hook in OBSERVER_HOOKS if (callers := self._split(hook))}

    def _split(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """One caller per module: in a common call the first exception would stop the others."""
        callers: list[tuple[str, Callable[..., Any]]] = []
        for key, module in self._modules.items():
            others = [one for one in self._modules.values() if one is not module]
            caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
            if caller.get_hookimpls():
                callers.append((key, caller))
        return callers
