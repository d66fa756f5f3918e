"""What goes wrong with the native library."""

from __future__ import annotations

from hotshoe.api import PluginLoadError


class NativeError(PluginLoadError):
    """The native library can't be provided here; the message has the remedy."""


class CompileError(NativeError):
    """The compiler refused the sources; trying again won't help."""
