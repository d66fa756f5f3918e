"""How processes log: one line per event, as text or JSON, to standard error."""

from __future__ import annotations

import logging

from hotshoe.config import EngineConfig


def configure_logging(config: EngineConfig, *, process: str) -> None:
    """Set up the root logger of a process.

    Args:
        config: level and format.
        process: name that marks its lines.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s",
    )
