"""Runs a file of requests, in the format of OpenAI's batches, and writes a file of responses.

Finished lines are collected in ``<output>.partial``, each written whole, and the file takes its
name when all are done. A run that was cut short is continued: lines that were answered stay.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from hotshoe.errors import ConfigError
from hotshoe.http_client import Answer

PATHS = ("/v1/chat/completions", "/v1/completions")
"""What a line may ask for in ``url``."""

_BUSY = (429, 503)
_MAX_ATTEMPTS = 8
_LONGEST_WAIT_S = 30.0


class Sender(Protocol):
    """Where requests go: a server, or an application in this process."""

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request. A failure of the network is an ``OSError``."""
        ...


@dataclass(slots=True)
class BatchCounts:
    """How many lines there were of each kind.

    Attributes:
        num_kept: answered by an earlier run.
        num_succeeded: answered with status 200.
        num_failed: answered with another status, or not at all.
    """

    num_kept: int = 0
    num_succeeded: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    custom_id: str
    path: str
    body: dict[str, Any]


class _BadLineError(Exception):
    """A line that is no request.

    Attributes:
        custom_id: if it has a usable one.
        code: machine-readable kind.
    """

    def __init__(self, custom_id: str | None, code: str, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.code = code


async def run_batch(
    sender: Sender,
    source: Path,
    target: Path,
    *,
    max_concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> BatchCounts:
    """Send every request of ``source`` that ``target`` has no answer for.

    A line that is no request, or whose request fails, becomes an entry that says so, and the run
    goes on. A request that the server is too busy for is sent again.

    Args:
        max_concurrency: most requests under way.
        on_done: called after each line.

    Raises:
        ConfigError: if a file can't be read or written.
    """
    partial = target.with_name(target.name + ".partial")
    kept = _start_partial(target, partial)
    counts = BatchCounts(num_kept=len(kept))
    try:
        with source.open("rb") as lines, partial.open("ab") as file:
            run = _Run(sender, file, counts, on_done)
            await run.all(_tasks(lines, kept), max_concurrency)
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"can't run the batch: {error}") from error
    partial.replace(target)
    return counts


class _Run:
    def __init__(
        self, sender: Sender, file: IO[bytes], counts: BatchCounts, on_done: Callable[[], None]
    ) -> None:
        self._sender = sender
        self._file = file
        self._counts = counts
        self._on_done = on_done

    async def all(self, tasks: Iterator[_Task | _BadLineError], max_concurrency: int) -> None:
        """Run tasks, so many at a time; they are read as places become free."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            for task in tasks:
                if isinstance(task, _BadLineError):
                    self._write_error(task.custom_id, task.code, str(task))
                    continue
                under_way.add(asyncio.create_task(self._one(task)))
                if len(under_way) >= max_concurrency:
                    under_way = await _progress(under_way)
            while under_way:
                under_way = await _progress(under_way)
        finally:
            for one in under_way:
                one.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _one(self, task: _Task) -> None:
        try:
            answer = await self._patient_request(task)
        except OSError as error:
            self._write_error(task.custom_id, "connection_error", str(error))
            return
        body = answer.json()
        response = {
            "status_code": answer.status,
            "request_id": answer.headers.get("x-request-id") or _id_of(body),
            "body": body if body is not None else {"error": {"message": answer.error_message}},
        }
        self._count(answer.status == 200)
        self._write(task.custom_id, response, None)

    async def _patient_request(self, task: _Task) -> Answer:
        """Send a request, again after a while if the server is busy or can't be reached."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            wait_s = min(_LONGEST_WAIT_S, 0.5 * 2**attempt)
            try:
                answer = await self._sender.request("POST", task.path, task.body)
            except OSError:
                if attempt == _MAX_ATTEMPTS:
                    raise
            else:
                if answer.status not in _BUSY or attempt == _MAX_ATTEMPTS:
                    return answer
                wait_s = _retry_after_s(answer.headers, wait_s)
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _write_error(self, custom_id: str | None, code: str, message: str) -> None:
        self._count(False)
        self._write(custom_id, None, {"code": code, "message": message})

    def _count(self, is_success: bool) -> None:
        if is_success:
            self._counts.num_succeeded += 1
        else:
            self._counts.num_failed += 1

    def _write(self, custom_id: str | None, response: Any, error: Any) -> None:
        entry = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        try:
            line = json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape
            line = json.dumps(entry).encode()
        self._file.write(line + b"\n")
        self._file.flush()
        self._on_done()


async def _progress(under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until one has ended; returns the others."""
    done, pending = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()
    return pending


def _tasks(lines: IO[bytes], kept: set[str]) -> Iterator[_Task | _BadLineError]:
    """What the lines ask for, without those that are answered already."""
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = _parse(line, number)
            if task.custom_id in seen:
                raise _BadLineError(
                    task.custom_id,
                    "duplicate_custom_id",
                    f"line {number}: custom_id {task.custom_id!r} is that of line "
                    f"{seen[task.custom_id]} already",
                )
        except _BadLineError as error:
            yield error
            continue
        seen[task.custom_id] = number
        if task.custom_id not in kept:
            yield task


def _parse(line: bytes, number: int) -> _Task:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(None, "invalid_json", f"line {number} is no JSON: {error}") from None
    found = entry.get("custom_id") if isinstance(entry, dict) else None
    custom_id = found if isinstance(found, str) and found else None

    def refuse(what: str) -> _BadLineError:
        return _BadLineError(custom_id, "invalid_request", f"line {number}: {what}")

    if not isinstance(entry, dict):
        raise refuse("allowed: an object with custom_id, method, url and body")
    if custom_id is None:
        raise refuse(f"custom_id: got {found!r:.60}, allowed: a text that is not empty")
    if entry.get("method", "POST") != "POST":
        raise refuse(f"method: got {entry['method']!r:.60}, allowed: 'POST'")
    if entry.get("url") not in PATHS:
        raise refuse(f"url: got {entry.get('url')!r:.60}, allowed: {', '.join(map(repr, PATHS))}")
    body = entry.get("body")
    if not isinstance(body, dict):
        raise refuse(f"body: got {body!r:.60}, allowed: an object")
    if body.get("stream"):
        raise refuse("body.stream: got True, allowed: False; a batch has whole responses")
    return _Task(custom_id, entry["url"], body)


def _start_partial(target: Path, partial: Path) -> set[str]:
    """Collect what earlier runs have answered in the partial file; returns its custom ids."""
    kept: dict[str, bytes] = {}
    try:
        for path in (target, partial):
            if path.exists():
                with path.open("rb") as lines:
                    kept.update(_answered(lines))
        fresh = partial.with_name(partial.name + ".new")
        fresh.write_bytes(b"".join(kept.values()))
        fresh.replace(partial)
    except OSError as error:
        raise ConfigError(f"can't write {str(target)!r}: {error.strerror}") from error
    return set(kept)


def _answered(lines: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Lines with an answer that another attempt wouldn't change. One that was cut off is none."""
    for line in lines:
        try:
            entry = json.loads(line)
            status = entry["response"]["status_code"]
            if line.endswith(b"\n") and status < 500 and status not in _BUSY:
                yield str(entry["custom_id"]), line
        except (ValueError, TypeError, KeyError):
            continue


def _retry_after_s(headers: Mapping[str, str], default_s: float) -> float:
    try:
        return min(_LONGEST_WAIT_S, max(0.0, float(headers["retry-after"])))
    except (KeyError, ValueError):
        return default_s


def _id_of(body: Any) -> str | None:
    return body.get("id") if isinstance(body, dict) else None
