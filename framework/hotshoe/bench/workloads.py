"""The workloads: prompts from fixed seeds, so that every engine and every run gets the same ones.

Prompts are token ids. Ids from 100 to 49,000 are ordinary tokens in every vocabulary of usual size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotshoe.api import StructuredOutputs

if TYPE_CHECKING:
    from hotshoe.text.tokenizer import Tokenizer

_FIRST_ID, _LAST_ID = 100, 49_000

TEXT = (
    "The ferry to Skarholm leaves at a quarter past seven from the third pier, unless the wind is "
    "in the west, when it leaves from the second. It carries forty passengers, nine cars and, on "
    "Tuesdays, the post. The crossing takes fifty minutes; in winter, when the captain keeps to "
    "the lee of the outer islands, it takes an hour and ten. There has been a ferry here since "
    "1863. The first was a rowing boat with six oars, and its master, a widow named Ingrid Dahl, "
    "charged two coins for a person and three for a pig. She wrote down every passenger in a red "
    "ledger, which is kept in the town library and lists 11,482 people, 730 pigs and one bishop. "
    "The steam ferry came in 1891 and was named after her. It sank in 1904, at its mooring, during "
    "the wedding of the harbour master's daughter, and was raised again within a week. Today's "
    "boat is electric. It charges for nineteen minutes at either end, from a cable that a robot "
    "plugs in, and makes so little noise that the seals on the middle skerry no longer look up. "
    "The cafe on the upper deck sells waffles with brown cheese, coffee, and copies of the red "
    "ledger. The last boat back leaves at half past nine, or when the captain has finished her tea."
)
"""What the ``copy`` workload repeats: about 300 tokens."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 40},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 3,
            "maxItems": 6,
        },
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
"""What the ``structured`` workload asks for as JSON."""

PATTERN = r"([A-Z][a-z]{2,9} ){20}[0-9]{4}-[0-9]{2}-[0-9]{2}"
"""What the ``structured`` workload asks for as a regular expression: about 100 tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that arrive together, and how many tokens each is to bring.

    Attributes:
        name: as on the command line.
        parameters: what it was made with.
        prompts: token ids.
        max_tokens: tokens per request; EOS does not end them earlier unless they are constrained.
        parts: prompts of one part run together, part after part. One part unless the workload
            is about what a part leaves behind, or compares parts.
        constraints: what the outputs of a part must be; parts that aren't named are free.
    """

    name: str
    parameters: Mapping[str, Any]
    prompts: Sequence[list[int]]
    max_tokens: int
    parts: Mapping[str, range] = field(default_factory=dict)
    constraints: Mapping[str, StructuredOutputs] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What can be changed about a workload; None: as the workload has it.

    Attributes:
        input_len: least and most tokens of a prompt.
        seed: of the prompts.
    """

    num_prompts: int | None = None
    input_len: tuple[int, int] | None = None
    output_len: int | None = None
    seed: int = 0


def throughput(tokenizer: Tokenizer, shape: Shape) -> Workload:
    """Many requests at once, of mixed lengths."""
    return _random_workload("throughput", tokenizer, shape, 32, (32, 256), 128)


def latency(tokenizer: Tokenizer, shape: Shape) -> Workload:
    """One request alone: time to the first token, and per token."""
    return _random_workload("latency", tokenizer, shape, 1, (128, 128), 256)


def prefill(tokenizer: Tokenizer, shape: Shape) -> Workload:
    """One long prompt."""
    return _random_workload("prefill", tokenizer, shape, 1, (1900, 1900), 1)


def prefix(tokenizer: Tokenizer, shape: Shape) -> Workload:
    """Requests that share most of their prompt, twice: with a cold cache and with a warm one.

    ``input_len`` is the length of the shared part; each prompt has 32 tokens of its own.
    """
    num_prompts, output_len = shape.num_prompts or 16, shape.output_len or 32
    low, high = shape.input_len or (1024, 1024)
    source = _TokenSource(tokenizer, shape.seed)
    shared = source.tokens(source.random.randint(low, high))
    prompts = [shared + source.tokens(32) for _ in range(num_prompts)]
    parameters = {
        "num_prompts": num_prompts,
        "shared_len": len(shared),
        "own_len": 32,
        "output_len": output_len,
        "seed": shape.seed,
    }
    parts = {"cold": range(num_prompts), "warm": range(num_prompts)}
    return Workload("prefix", parameters, prompts, output_len, parts)


def copy(tokenizer: Tokenizer, shape: Shape) -> Workload:
    """Repeat a text word for word: what drafts by look-up are made for."""
    output_len = shape.output_len or 200
    request = f"Repeat this text exactly, word for word:\n\n{TEXT}"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": request}])
    num_prompts = shape.num_prompts or 1
    parameters = {"num_prompts": num_prompts, "output_len": output_len}
    return Workload("copy", parameters, [prompt] * num_prompts, output_len)


def structured(tokenizer: Tokenizer, shape: Shape) -> Workload:
    """Free output, a JSON schema and a regular expression, for one request and for several at once.

    Needs a guided-decoding backend. Constrained outputs end where the constraint is satisfied.
    """
    output_len = shape.output_len or 96
    num_prompts = shape.num_prompts or 16
    request = "Describe a fictional person as JSON with the fields name, age, city and tags."
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": request}])
    constraints = {
        "free": None,
        "json": StructuredOutputs(json=json.dumps(SCHEMA)),
        "regex": StructuredOutputs(regex=PATTERN),
    }
    parts, constraint_of = {}, {}
    for name, constraint in constraints.items():
        for batch_size in sorted({1, num_prompts}):
            part = f"{name} x {batch_size}"
            parts[part] = range(batch_size)
            if constraint is not None:
                constraint_of[part] = constraint
    return Workload(
        "structured",
        {"num_prompts": num_prompts, "output_len": output_len},
        [prompt] * num_prompts,
        output_len,
        parts,
        constraint_of,
    )


WORKLOADS: dict[str, Callable[[Tokenizer, Shape], Workload]] = {
    made.__name__: made for made in (throughput, latency, prefill, prefix, copy, structured)
}
"""By name."""


def _random_workload(
    name: str,
    tokenizer: Tokenizer,
    shape: Shape,
    num_prompts: int,
    input_len: tuple[int, int],
    output_len: int,
) -> Workload:
    num_prompts = shape.num_prompts or num_prompts
    low, high = shape.input_len or input_len
    output_len = shape.output_len or output_len
    source = _TokenSource(tokenizer, shape.seed)
    prompts = [source.tokens(source.random.randint(low, high)) for _ in range(num_prompts)]
    parameters = {
        "num_prompts": num_prompts,
        "input_len": [low, high],
        "output_len": output_len,
        "seed": shape.seed,
    }
    return Workload(name, parameters, prompts, output_len)


class _TokenSource:
    """Random ordinary tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        is_small = tokenizer.vocab_size <= 2 * _FIRST_ID + 256
        self._low = 0 if is_small else _FIRST_ID
        self._high = min(tokenizer.vocab_size, _LAST_ID)
        self._special = tokenizer.special_token_ids

    def tokens(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            token_id = self.random.randrange(self._low, self._high)
            if token_id not in self._special:
                found.append(token_id)
        return found
