"""Find, select, load and build plugins.

``discover`` reads metadata only; ``PluginRegistry`` imports what was selected, and nothing else;
``inspect_in_subprocess`` looks inside a plugin without importing it here, and
``prepare_in_subprocess`` lets it do its heavy start-up work.
"""

from hotshoe.plugins.discovery import PluginInfo, discover
from hotshoe.plugins.inspection import inspect_in_subprocess, prepare_in_subprocess
from hotshoe.plugins.registry import (
    LoadedPlugin,
    PluginIdentity,
    PluginRegistry,
    RefusedPlugin,
)

__all__ = [
    "LoadedPlugin",
    "PluginIdentity",
    "PluginInfo",
    "PluginRegistry",
    "RefusedPlugin",
    "discover",
    "inspect_in_subprocess",
    "prepare_in_subprocess",
]
