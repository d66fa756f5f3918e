"""The arguments of commands that talk to a server."""

from __future__ import annotations

import argparse
import os

from hotshoe.config import ResolvedConfig
from hotshoe.config.values import config_error

API_KEY_VARIABLE = "OPENAI_API_KEY"


def add_server_arguments(group: argparse._ArgumentGroup, *, url: str | None, help: str) -> None:
    """Add ``--url`` and ``--api-key``.

    Args:
        url: the default.
        help: of ``--url``.
    """
    group.add_argument("--url", default=url, metavar="URL", help=help)
    group.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}, if set")


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key to send; None: none."""
    return arguments.api_key or os.environ.get(API_KEY_VARIABLE) or None


def refuse_engine_settings(resolved: ResolvedConfig) -> None:
    """Refuse flags and files that configure an engine, where ``--url`` names a server.

    Raises:
        ConfigError: naming them.
    """
    given = sorted(
        origin.removeprefix("cli ")
        for origin in set(resolved.origins.values())
        if origin.startswith(("cli ", "file "))
    )
    if given:
        raise config_error(
            [f"{', '.join(given)}: the server of --url has its own engine; drop either"]
        )
