"""How ``compare.py`` and an engine talk: one JSON object a line over standard input and output.

Imported by the driver of every engine inside that engine's own environment: standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NoReturn


@dataclass(frozen=True)
class Settings:
    """What an engine is started with.

    Attributes:
        variant: of the weights, such as ``bf16``; a driver says which it knows.
        drafts: whether drafts by n-gram lookup are on.
        models: path by kind: ``checkpoint``, ``gguf``, ``openvino-int8``, ``openvino-fp16``.
        workloads: file with the workloads of every round.
    """

    variant: str
    drafts: bool
    models: Mapping[str, str]
    workloads: str
    num_threads: int
    max_model_len: int = 2560
    max_num_seqs: int = 32
    kv_cache_gb: int = 1
    num_draft_tokens: int = 5
    max_ngram: int = 4


@dataclass(frozen=True)
class Job:
    """Requests that start together, greedy.

    Attributes:
        part: name of the part of the workload; empty if it has none.
        ignore_eos: every request brings ``max_tokens``.
        shared_len: tokens that all prompts begin with.
        keep_cache: the prefix cache may hold what the part before left.
        json_schema: what the outputs must be, as text; None: free.
        regex: the same as a pattern.
    """

    part: str
    prompts: list[list[int]]
    max_tokens: int
    shared_len: int = 0
    keep_cache: bool = False
    json_schema: str | None = None
    regex: str | None = None

    @property
    def ignore_eos(self) -> bool:
        """Constrained outputs end where the constraint is satisfied."""
        return self.json_schema is None and self.regex is None


@dataclass(frozen=True)
class Timing:
    """One request: when its first and last token came, since the job began, and how many came."""

    first_s: float
    last_s: float
    num_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What a job took.

    Attributes:
        timings: one per request.
        details: what else the engine tells, such as cached tokens.
    """

    elapsed_s: float
    timings: Sequence[Timing]
    details: Mapping[str, Any]

    @classmethod
    def of(cls, elapsed_s: float, timings: Sequence[Timing], **details: Any) -> Outcome:
        """With details as keywords."""
        return cls(elapsed_s, timings, details)


class UnsupportedError(Exception):
    """An engine can't do a job; the message says why. The others go on."""


class Engine(ABC):
    """An engine in this process."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Versions and settings that a reader of the results should know."""

    @abstractmethod
    def run(self, job: Job) -> Outcome:
        """Run a job and take times.

        Raises:
            UnsupportedError: if the engine has no such feature.
        """


def main(build: Callable[[Settings], Engine]) -> None:
    """Load an engine, then run what standard input asks for, until it ends.

    Answers go to what was standard output; whatever the engine prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = Settings(**json.loads(sys.argv[1]))
    with open(settings.workloads) as file:
        workloads = json.load(file)

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")

    try:
        engine = build(settings)
        engine.run(Job("", [[5, 6, 7, 8]], 1))
    except UnsupportedError as error:
        answer(unsupported=str(error))
        return
    answer(ready=engine.describe())
    for line in sys.stdin:
        request = json.loads(line)
        jobs = workloads[request["workload"]][request["round"]]
        limit = request.get("max_tokens")
        answer(parts={job["part"]: _measure(engine, job, limit) for job in jobs})


def _measure(engine: Engine, fields: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    job = Job(**fields)
    if limit is not None:
        job = Job(**{**fields, "max_tokens": min(limit, job.max_tokens)})
    try:
        outcome = engine.run(job)
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    return _figures(job, outcome)


def _figures(job: Job, outcome: Outcome) -> dict[str, Any]:
    num_prompt = sum(map(len, job.prompts))
    num_output = sum(one.num_tokens for one in outcome.timings)
    gaps = [
        (one.last_s - one.first_s) / (one.num_tokens - 1)
        for one in outcome.timings
        if one.num_tokens > 1
    ]
    return {
        "elapsed_s": outcome.elapsed_s,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "output_tokens_per_s": num_output / outcome.elapsed_s,
        "total_tokens_per_s": (num_prompt + num_output) / outcome.elapsed_s,
        "ttft_ms": 1e3 * fmean(one.first_s for one in outcome.timings),
        "tpot_ms": 1e3 * fmean(gaps) if gaps else None,
        **outcome.details,
    }


def unknown_variant(settings: Settings, *known: str) -> NoReturn:
    """Refuse a variant.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"no variant named {settings.variant!r}; known: {', '.join(known)}")
