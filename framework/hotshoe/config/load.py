"""Build an ``EngineConfig`` from all its sources, and remember where each value came from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hotshoe.config.flags import CommandLineSource
from hotshoe.config.paths import Paths
from hotshoe.config.schema import ENV_PREFIX, EngineConfig
from hotshoe.config.sources import (
    ArgumentSource,
    EnvironmentSource,
    FileSource,
    LayerSource,
    merge,
    nest,
)
from hotshoe.config.values import config_error, validation_problems

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A config, and where each of its values came from.

    Attributes:
        config: the values.
        origins: per dotted path ``default``, ``file <path>``, ``env <variable>``, ``cli <flag>`` or
            ``argument``; options have one entry per key.
        notes: one line per option that was dropped because a higher layer selects another plugin.
    """

    config: EngineConfig
    origins: dict[str, str]
    notes: tuple[str, ...] = ()


def load_config(
    file: Path | None = None,
    cli: Sequence[str] | Mapping[str, Any] = (),
    *,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Build the config from defaults < file < environment < command line < arguments.

    A layer that selects another plugin for a section drops the options that lower layers gave to
    the former one; with the same plugin, options merge key by key. Lists are replaced.

    Args:
        file: ``.yaml``, ``.yml``, ``.toml`` or ``.json``.
        cli: flags as typed (``["--max-num-seqs", "8"]``), or values by flag without dashes.
        overrides: nested values by section, component names, or well-known names such as
            ``max_model_len``: what ``LLM(...)`` accepts.
        env: the environment; None: that of the process.

    Raises:
        ConfigError: listing everything that is wrong, each with path, value, what is allowed, and
            where it came from.
    """
    paths = Paths.of(EngineConfig)
    layers: list[LayerSource] = []
    if file is not None:
        layers.append(FileSource(EngineConfig, paths, Path(file)))
    environment = os.environ if env is None else env
    layers.append(EnvironmentSource(EngineConfig, paths, environment, prefix=ENV_PREFIX))
    layers.append(CommandLineSource(EngineConfig, paths, cli))
    layers.append(ArgumentSource(EngineConfig, paths, overrides or {}))
    resolved = _resolve(layers, paths)
    for note in resolved.notes:
        logger.info("%s", note)
    return resolved


def normalize_arguments(**arguments: Any) -> dict[str, Any]:
    """Sort the keyword arguments of ``LLM(...)`` into nested config sections.

    Takes section mappings (``cache={"block_size": 32}``), component names
    (``scheduler="priority"``, ``model="path"``) and well-known names (``max_model_len=2048``).

    Raises:
        ConfigError: for an unknown name, or one value given twice.
    """
    source = ArgumentSource(EngineConfig, Paths.of(EngineConfig), arguments)
    if source.problems:
        raise config_error(source.problems)
    return source()


def _resolve(layers: Sequence[LayerSource], paths: Paths) -> ResolvedConfig:
    settings, notes = merge(layers, paths)
    problems = [problem for layer in layers for problem in layer.problems]
    try:
        config = EngineConfig(**nest(settings))
    except ValidationError as error:
        raise config_error(problems + validation_problems(error, settings, paths)) from None
    if problems:
        raise config_error(problems)
    origins = dict.fromkeys(paths.leaves, "default")
    for path, setting in settings.items():
        if len(path) > 1 and path[-2] == "options":
            origins.pop(".".join(path[:-1]), None)
        origins[".".join(path)] = setting.origin
    return ResolvedConfig(config=config, origins=origins, notes=tuple(notes))
