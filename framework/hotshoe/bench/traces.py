"""Reads timed traces of production traffic: when requests came, and how long they were.

Two formats, told apart by their content:

- CSV with the columns ``TIMESTAMP,ContextTokens,GeneratedTokens``, as the Azure LLM inference
  traces have it. A time is a date with time of day, or a number of seconds.
- JSON lines with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and, if
  prefixes are to be shared, ``hash_ids``: one id per block of 512 prompt tokens, equal ids for
  equal blocks after equal prefixes, as the Mooncake traces have it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hotshoe.errors import ConfigError

HASH_BLOCK_LEN = 512
"""Prompt tokens that one hash id stands for."""

_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace.

    Attributes:
        arrival_s: since the first request of the trace.
        hash_ids: which blocks of ``HASH_BLOCK_LEN`` tokens the prompt consists of; None: unknown.
    """

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None = None


def read_trace(path: Path) -> list[TraceEntry]:
    """The requests of a trace in the order in which they came.

    Raises:
        ConfigError: if it can't be read, with the line that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"can't read the trace {str(path)!r}: {reason}") from error
    rows = _json_rows(text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    read = _from_json if text.lstrip().startswith("{") else _from_csv
    entries = sorted(_entries(path, rows, read), key=lambda entry: entry.arrival_s)
    if not entries:
        raise ConfigError(f"the trace {str(path)!r} has no requests")
    start = entries[0].arrival_s
    return [
        TraceEntry(entry.arrival_s - start, entry.input_len, entry.output_len, entry.hash_ids)
        for entry in entries
    ]


def _json_rows(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    missing = [name for name in _CSV_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"the trace {str(path)!r} is neither JSON lines nor a CSV with the columns "
            f"{', '.join(_CSV_COLUMNS)}; missing: {', '.join(missing)}"
        )
    for row in reader:
        yield reader.line_num, row


def _entries(
    path: Path, rows: Iterator[tuple[int, Any]], read: Callable[[Any], TraceEntry]
) -> Iterator[TraceEntry]:
    for number, row in rows:
        try:
            entry = read(row)
            if entry.input_len < 1 or entry.output_len < 0:
                raise ValueError(
                    f"got {entry.input_len} prompt and {entry.output_len} output tokens"
                )
        except KeyError as error:
            raise ConfigError(f"{path}:{number}: no {error.args[0]!r}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        yield entry


def _from_csv(row: Mapping[str, str]) -> TraceEntry:
    time, input_len, output_len = (row[name] for name in _CSV_COLUMNS)
    return TraceEntry(_seconds(time), int(input_len), int(output_len))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _from_json(line: str) -> TraceEntry:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"got {line[:40]!r}, allowed: a JSON object")
    hash_ids: Sequence[int] | None = row.get("hash_ids")
    return TraceEntry(
        arrival_s=float(row["timestamp"]) / 1000,
        input_len=int(row["input_length"]),
        output_len=int(row["output_length"]),
        hash_ids=None if hash_ids is None else tuple(int(one) for one in hash_ids),
    )
