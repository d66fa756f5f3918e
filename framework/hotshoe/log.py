"""How processes log: one line per event, as text or JSON, to standard error.

Nothing here or elsewhere writes prompts or outputs, unless ``server.log_prompts`` asks for them and
``log_level`` is ``debug``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from hotshoe.config import EngineConfig

_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_NEWLINES = str.maketrans(
    {code: repr(chr(code))[1:-1] for code in (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029)}
)


def configure_logging(
    config: EngineConfig, *, process: str, stream: TextIO | None = None
) -> logging.Handler:
    """Set up the log of a process, instead of whatever was set up before.

    hotshoe and its plugins (see ``log_as_plugin``) log from ``log_level`` on, other libraries from
    ``warning`` on. uvicorn's loggers lose their own handlers and formats; start it with
    ``log_config=None``. Its line per request is shown at ``debug`` only.

    Args:
        config: level and format.
        process: name that marks its lines, such as ``core`` or ``api-0``.
        stream: where lines go; None: standard error.

    Returns:
        The handler, the only one of the root logger.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    is_json = config.server.log_format == "json"
    handler.setFormatter(JsonFormatter(process) if is_json else TextFormatter(process))
    level = config.log_level.upper()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, getattr(logging, level)))
    for name in ("hotshoe", *_UVICORN):
        one = logging.getLogger(name)
        one.handlers[:] = []
        one.propagate = True
        one.setLevel(level)
    if config.log_level != "debug":
        # "Started server process", "Waiting for application startup": the command says it better
        for name in _UVICORN:
            logging.getLogger(name).setLevel(logging.WARNING)
    return handler


def log_as_plugin(module: str) -> None:
    """Let the package of a plugin log from the level on that ``configure_logging`` gave hotshoe.

    Does nothing where it wasn't called, or where somebody has given the package a level.
    """
    one = logging.getLogger(module.partition(":")[0].partition(".")[0].strip())
    if one.level == logging.NOTSET:
        one.setLevel(logging.getLogger("hotshoe").level)


class TextFormatter(logging.Formatter):
    """``2026-01-31 12:00:00.123 INFO core hotshoe.engine.core: message``, then the traceback.

    Control characters in the message are escaped: what clients send can't look like a line of its
    own.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One event."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = record.getMessage().translate(_NEWLINES)
        line = (
            f"{moment}.{int(record.msecs):03d} {record.levelname} {self._process} "
            f"{record.name}: {message}"
        )
        if fields := _extra(record):
            line += " " + " ".join(
                f"{name}={str(value).translate(_NEWLINES)}" for name, value in fields.items()
            )
        return "\n".join([line, *_tracebacks(self, record)])


class JsonFormatter(logging.Formatter):
    """One JSON object per event: ``time`` (UTC), ``level``, ``process``, ``pid``, ``logger``,
    ``message``, the fields passed as ``extra``, and ``exception`` if there is one.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One event."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = _extra(record) | fields
        if traceback := "\n".join(_tracebacks(self, record)):
            fields["exception"] = traceback
        return json.dumps(fields, default=str, ensure_ascii=False)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed as ``extra``; uvicorn's ``color_message`` repeats the message."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _RECORD_FIELDS and name != "color_message"
    }


def _tracebacks(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return parts
