"""What a load test sends: requests from random tokens, from a file of prompts, or from a trace.

Everything random comes from a seed, so a load can be sent again, to another server too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from hotshoe.bench.prompts import Content, PromptSource
from hotshoe.bench.traces import HASH_BLOCK_LEN, TraceEntry, read_trace
from hotshoe.errors import ConfigError

_T = TypeVar("_T")

Range = tuple[int, int]
"""Least and most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One user: a request, or several that follow one another in a conversation.

    Attributes:
        turns: per turn a prompt, or the messages of a chat; the answers are put between them.
        output_len: tokens to generate; None: as the command line says.
        arrival_s: when the user comes, since the start; None: as the request rate says.
    """

    turns: tuple[Content | list[dict[str, Any]], ...]
    output_len: int | None = None
    arrival_s: float | None = None


def random_requests(
    source: PromptSource, *, num_prompts: int, input_len: Range, output_len: Range, seed: int
) -> list[PlannedRequest]:
    """Prompts with nothing in common, lengths evenly spread."""
    random = Random(f"{seed}/random")
    requests = []
    for _ in range(num_prompts):
        piece = source.piece(random, random.randint(*input_len))
        requests.append(
            PlannedRequest(turns=(source.prompt(piece),), output_len=random.randint(*output_len))
        )
    return requests


def prefix_requests(
    source: PromptSource,
    *,
    num_prefixes: int,
    num_per_prefix: int,
    prefix_len: int,
    input_len: Range,
    output_len: Range,
    seed: int,
) -> list[PlannedRequest]:
    """Every prefix so many times, with different endings, in random order.

    Args:
        input_len: tokens after the prefix.
    """
    random = Random(f"{seed}/prefix")
    prefixes = [source.piece(random, prefix_len) for _ in range(num_prefixes)]
    order = [prefix for prefix in prefixes for _ in range(num_per_prefix)]
    random.shuffle(order)
    requests = []
    for prefix in order:
        piece = [*prefix, *source.piece(random, random.randint(*input_len))]
        requests.append(
            PlannedRequest(turns=(source.prompt(piece),), output_len=random.randint(*output_len))
        )
    return requests


def file_requests(
    path: Path, *, num_prompts: int | None, sample: bool, seed: int, allow_chat: bool
) -> list[PlannedRequest]:
    """Prompts from JSON lines with ``prompt``, ``messages`` or ``turns``.

    Args:
        num_prompts: how many lines; None: all.
        sample: take lines at random rather than the first.
        allow_chat: whether the endpoint takes messages and turns.

    Raises:
        ConfigError: if it can't be read, with the line that is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"can't read the prompts {str(path)!r}: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    taken = _taken(numbered, num_prompts, sample=sample, seed=seed, what=str(path))
    requests = []
    for number, line in taken:
        try:
            requests.append(PlannedRequest(turns=_turns(line, allow_chat=allow_chat)))
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    return requests


def _turns(line: bytes, *, allow_chat: bool) -> tuple[Content | list[dict[str, Any]], ...]:
    row = json.loads(line)
    found = [key for key in ("prompt", "turns", "messages") if isinstance(row, dict) and key in row]
    if len(found) != 1:
        raise ValueError("allowed: an object with one of 'prompt', 'turns' and 'messages'")
    key, value = found[0], row[found[0]]
    if key != "prompt" and not allow_chat:
        raise ValueError(f"{key!r} are for chats; add --endpoint chat")
    if key == "prompt" and isinstance(value, str):
        return (value,)
    if key == "turns" and value and all(isinstance(one, str) for one in value):
        return tuple(value)
    if key == "messages" and value and all(isinstance(one, dict) for one in value):
        return (value,)
    raise ValueError(
        f"{key!r}: got {value!r:.60}, allowed: a text for 'prompt', texts for 'turns', objects for "
        "'messages'"
    )


def trace_requests(
    source: PromptSource,
    path: Path,
    *,
    num_prompts: int | None,
    sample: bool,
    time_scale: float,
    length_scale: float,
    max_total_len: int | None,
    seed: int,
) -> tuple[list[PlannedRequest], int]:
    """The requests of a trace at their times, with random prompts of their lengths.

    Where the trace says which blocks of prompts are equal, those of the prompts are.

    Args:
        sample: take requests at random rather than the first: the same hours, with less traffic.
        time_scale: what the times are multiplied by; 0.5 is twice the traffic.
        length_scale: what the lengths are multiplied by.
        max_total_len: leave out requests with more tokens than this, output included.

    Returns:
        The requests, and how many were left out.
    """
    entries = [_scaled(entry, time_scale, length_scale) for entry in read_trace(path)]
    fitting = [
        entry
        for entry in entries
        if max_total_len is None or entry.input_len + entry.output_len <= max_total_len
    ]
    taken = _taken(fitting, num_prompts, sample=sample, seed=seed, what=str(path))
    first_s = taken[0].arrival_s
    block_len = max(1, round(HASH_BLOCK_LEN * length_scale))
    random = Random(f"{seed}/trace")
    requests = [
        PlannedRequest(
            turns=(source.prompt(_trace_piece(source, entry, block_len, random, seed)),),
            output_len=entry.output_len,
            arrival_s=entry.arrival_s - first_s,
        )
        for entry in taken
    ]
    return requests, len(entries) - len(fitting)


def _scaled(entry: TraceEntry, time_scale: float, length_scale: float) -> TraceEntry:
    return TraceEntry(
        arrival_s=entry.arrival_s * time_scale,
        input_len=max(1, round(entry.input_len * length_scale)),
        output_len=max(1, round(entry.output_len * length_scale)),
        hash_ids=entry.hash_ids,
    )


def _trace_piece(
    source: PromptSource, entry: TraceEntry, block_len: int, random: Random, seed: int
) -> list[int | str]:
    piece: list[int | str] = []
    for hash_id in entry.hash_ids or ():
        # a block's content depends on its id alone, so that equal prefixes are equal
        piece += source.piece(Random(f"{seed}/block/{hash_id}"), block_len)
    missing = max(0, entry.input_len - len(piece))
    return [*piece[: entry.input_len], *source.piece(random, missing)]


def _taken(
    found: Sequence[_T], num_wanted: int | None, *, sample: bool, seed: int, what: str
) -> list[_T]:
    wanted = len(found) if num_wanted is None else num_wanted
    if not found or wanted > len(found):
        raise ConfigError(
            f"--num-prompts is {wanted} but {what!r} has {len(found)} that can be sent; lower it"
        )
    if not sample:
        return list(found[:wanted])
    return [found[at] for at in sorted(Random(f"{seed}/sample").sample(range(len(found)), wanted))]
