"""Command-line parsing shared by the subcommands: own arguments beside every config flag."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hotshoe.config import EngineConfig, ResolvedConfig, load_config
from hotshoe.config.flags import CommandLineSource, unknown_flag
from hotshoe.config.help import describe_flags
from hotshoe.config.paths import Paths
from hotshoe.config.values import config_error
from hotshoe.errors import ConfigError
from hotshoe.log import configure_logging

logger = logging.getLogger(__name__)


class CommandParser(argparse.ArgumentParser):
    """``ArgumentParser`` that raises ``ConfigError`` and takes no abbreviated flags."""

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog, description=description, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that every error looks the same."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    @property
    def flags(self) -> list[str]:
        """The flags that were added."""
        return list(self._option_string_actions)


def parse_engine_arguments(
    parser: CommandParser, argv: Sequence[str], *, env: Mapping[str, str] | None = None
) -> tuple[ResolvedConfig, argparse.Namespace]:
    """Read the arguments of a command that takes the engine's configuration.

    Config flags are recognised wherever they stand; what is left goes to ``parser``. ``--help``
    lists them, grouped by section. Logging is set up for ``log_level``.

    Args:
        parser: has the command's own arguments; ``--config FILE`` is added unless it has a
            ``config`` argument already. Own flags must not have the name of a config flag.
        argv: what follows the command's name.
        env: the environment; None: that of the process.

    Raises:
        ConfigError: listing everything that is wrong with the configuration.
    """
    paths = Paths.of(EngineConfig)
    clashes = [flag for flag in parser.flags if paths.find(flag.lstrip("-").replace("-", "_"))]
    assert not clashes, f"{parser.prog}: {clashes} are config flags already"
    if all(action.dest != "config" for action in parser._actions):
        parser.add_argument("--config", metavar="FILE", help="config file: YAML, TOML or JSON")
    parser.epilog = f"engine configuration:\n\n{describe_flags()}"
    given = CommandLineSource(EngineConfig, paths, argv, keep_unknown=True)
    namespace, unknown = parser.parse_known_args(given.rest)
    if unknown:
        own = parser.flags
        raise config_error([unknown_flag(token, paths, own) for token in unknown])
    file = Path(namespace.config) if namespace.config is not None else None
    resolved = load_config(file, given.taken, env=env)
    set_up_logging(resolved)
    return resolved, namespace


def set_up_logging(resolved: ResolvedConfig) -> None:
    """Show the log on stderr from ``log_level`` on, and what was noticed while resolving."""
    configure_logging(resolved.config, process="hotshoe")
    for note in resolved.notes:
        logger.info("%s", note)


def quieten(resolved: ResolvedConfig) -> None:
    """Show warnings and errors only, unless somebody has set ``log_level``."""
    if resolved.origins["log_level"] == "default":
        logging.getLogger("hotshoe").setLevel(logging.WARNING)
