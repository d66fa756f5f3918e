"""Requests that a ``TokenSampler`` gives tokens to, on the CPU or on a pretended GPU, and what they
should get, computed the slow and plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

import msgspec
import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    Grammar,
    LogitsBatch,
    LogitsProcessor,
    NewRequest,
    Sampler,
    SamplingParams,
)
from hotshoe.testing.distributions import Filter, draw_by_noise, filtered_probabilities
from hotshoe.worker.random import uniforms
from hotshoe.worker.sampling import SampledTokens, SamplingStep, TokenSampler
from hotshoe.worker.streams import Streams
from hotshoe_samplers import standard

VOCAB_SIZE = 21
EOS = 2
STOP_IDS = (EOS, 5)
PROMPTS = ([1, 4, 4, 9], [7], [3, 8, 20, 3, 3, 11, 0])
CPU = torch.device("cpu")


def model(tokens: Sequence[int], vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """A "model": logits are a function of the whole history."""
    numbers = np.random.default_rng(crc32(np.array(tokens, dtype=np.int32).tobytes()))
    return (numbers.normal(size=vocab_size) * 2).astype(np.float32)


def standard_sampler() -> Sampler:
    return standard.build(standard.hotshoe_component().options(), None)  # type: ignore[arg-type]


@dataclass
class Running:
    """One request of the harness."""

    request: NewRequest
    tokens: list[int]
    grammar: Grammar | None = None
    logprobs: list[Any] = field(default_factory=list)
    error: str | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]


class Gpu(Protocol):
    """A real one, or one that is pretended; entered where it must not be waited for."""

    @property
    def device(self) -> torch.device: ...

    @property
    def streams(self) -> Streams: ...

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on it."""

    def get(self, tensor: Tensor) -> Tensor:
        """The tensor on the CPU."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> object: ...


Drafter = Callable[[Running], list[int]]


class Harness:
    """Steps requests through a ``TokenSampler`` the way a runner does."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        *,
        processors: dict[str, tuple[LogitsProcessor, bool]] | None = None,
        grammars: Sequence[Grammar | None] | None = None,
        model: Callable[[Sequence[int]], np.ndarray] = model,
        gpu: Gpu | None = None,
    ) -> None:
        self.model = model
        self.gpu = gpu
        with gpu or nullcontext():
            self.sampler = TokenSampler(
                sampler=standard_sampler(),
                max_num_seqs=8,
                vocab_size=VOCAB_SIZE,
                device=gpu.device if gpu else CPU,
                logits_processors=processors,
                streams=gpu.streams if gpu else None,
            )
        self.token_ids = np.full((8, 200), 17, dtype=np.int32)
        self.num_tokens = np.zeros(8, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(8, dtype=np.int64)
        self.running: dict[int, Running] = {}
        for index, one in enumerate(params):
            prompt = PROMPTS[index % len(PROMPTS)]
            request = NewRequest(
                f"r{index}", index, list(prompt), one, 100 + index, index % 2, 0, (), STOP_IDS
            )
            grammar = grammars[index] if grammars else None
            self.place(index, Running(request, list(prompt), grammar))

    def place(self, row: int, running: Running) -> None:
        self.running[row] = running
        with self.gpu or nullcontext():
            self.sampler.add_row(row, running.request)
        self.token_ids[row, : len(running.tokens)] = running.tokens
        self.num_tokens[row] = len(running.tokens)
        self.num_prompt_tokens[row] = len(running.request.prompt_token_ids)

    def take(self, row: int) -> Running:
        self.sampler.remove_row(row)
        self.token_ids[row] = 17
        return self.running.pop(row)

    def step(self, drafter: Drafter | None = None) -> SampledTokens:
        rows = [row for row, running in self.running.items() if running.error is None]
        drafts = [drafter(self.running[row]) if drafter else [] for row in rows]
        rows_of_logits = [
            self.model(self.running[row].tokens + draft[:num])
            for row, draft in zip(rows, drafts, strict=True)
            for num in range(len(draft) + 1)
        ]
        logits = torch.from_numpy(np.stack(rows_of_logits))
        step = SamplingStep(
            rows=rows,
            request_ids=[self.running[row].request.request_id for row in rows],
            draft_token_ids=drafts,
            logits=self.gpu.put(logits) if self.gpu else logits,
            token_ids=self.token_ids,
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            grammars={
                row: self.running[row].grammar  # type: ignore[misc]
                for row in rows
                if self.running[row].grammar is not None
            },
        )
        with self.gpu or nullcontext():
            sampled = self.sampler.sample(step)
        for index, row in enumerate(rows):
            self._commit(row, sampled, index)
        return sampled

    def _commit(self, row: int, sampled: SampledTokens, index: int) -> None:
        running, new = self.running[row], sampled.token_ids[index]
        running.error = sampled.errors.get(index)
        running.tokens += new
        running.logprobs += sampled.logprobs.get(index, [])
        self.token_ids[row, : len(running.tokens)] = running.tokens
        self.num_tokens[row] = len(running.tokens)

    def run(self, num_output: int, drafter: Drafter | None = None) -> list[list[int]]:
        """Step until every request has so many tokens; its first ones."""
        while any(
            running.error is None and len(running.output) < num_output
            for running in self.running.values()
        ):
            self.step(drafter)
        return [running.output[:num_output] for _, running in sorted(self.running.items())]


def reference_logits(params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The edits, token by token, as their descriptions say."""
    logits = model(prompt + output).astype(np.float64)
    for token_id in range(VOCAB_SIZE):
        count = output.count(token_id)
        if token_id in prompt or count:
            factor = params.repetition_penalty
            logits[token_id] *= 1 / factor if logits[token_id] > 0 else factor
        logits[token_id] -= params.frequency_penalty * count
        logits[token_id] -= params.presence_penalty * (count > 0)
        logits[token_id] += (params.logit_bias or {}).get(token_id, 0)
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            logits[token_id] = -np.inf
        if len(output) < params.min_tokens and token_id in STOP_IDS:
            logits[token_id] = -np.inf
        for *before, last in params.bad_words_token_ids:
            if last == token_id and output[len(output) - len(before) :] == before:
                logits[token_id] = -np.inf
    return logits


def reference_output(
    params: SamplingParams, prompt: list[int], seed: int, choice: int, num_output: int
) -> list[int]:
    output: list[int] = []
    chosen = Filter(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
    )
    for position in range(len(prompt), len(prompt) + num_output):
        logits = reference_logits(params, prompt, output)
        probabilities = filtered_probabilities(logits.astype(np.float32), chosen)
        number = uniforms(np.array([seed], np.uint64), np.array([choice]), np.array([position]))
        output.append(draw_by_noise(probabilities, float(number[0])).token_id)
    return output


PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(),
    "filtered": SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.02),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(temperature=0.4, frequency_penalty=0.9),
    "negative": SamplingParams(temperature=0, presence_penalty=-1.0, frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias={3: 4.0, 20: -100.0, 0: 1.5}),
    "allowed": SamplingParams(temperature=0.8, allowed_token_ids=(1, 6, 7, 19, 20)),
    "bad_words": SamplingParams(
        allowed_token_ids=(6, 7, 8),
        bad_words_token_ids=((6, 6), (7, 8), (8, 7, 6), (8, 8, 8), (19,)),
    ),
    "min_tokens": SamplingParams(
        temperature=0, min_tokens=6, logit_bias={EOS: 100.0, 5: 99.0}, max_tokens=99
    ),
    "everything": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={4: 2.0, 9: -3.0},
        bad_words_token_ids=((4, 4), (9,)),
        allowed_token_ids=tuple(range(18)),
        min_tokens=4,
    ),
}
NUM_OUTPUT = 24


def no_drafts(running: Running) -> list[int]:
    return []


def bad_drafts(running: Running) -> list[int]:
    return [VOCAB_SIZE - 1, 0, 1]


def mixed_drafts(running: Running) -> list[int]:
    """Good for a while: how many and where they go wrong depends on the history."""
    number = crc32(bytes(running.tokens))
    num_good = number % 4
    one = running.request
    wanted = reference_output(
        one.sampling_params, one.prompt_token_ids, one.seed, one.choice_index, NUM_OUTPUT + 8
    )
    good = wanted[len(running.output) : len(running.output) + num_good]
    return good + [number % VOCAB_SIZE] * (number // 7 % 3)


def repeated_drafts(running: Running) -> list[int]:
    """The last token over and over: what penalties and bad words care about."""
    return running.tokens[-1:] * 3


def step_of(harness: Harness, logits: Tensor, drafts: Sequence[Sequence[int]] = ((),)) -> Any:
    return SamplingStep(
        rows=list(range(len(drafts))),
        request_ids=[f"r{row}" for row in range(len(drafts))],
        draft_token_ids=drafts,
        logits=logits,
        token_ids=harness.token_ids,
        num_tokens=harness.num_tokens,
        num_prompt_tokens=harness.num_prompt_tokens,
    )


class ListGrammar(Grammar):
    """Allows, at each position, a set of tokens; then it is complete and only EOS may follow."""

    def __init__(self, allowed: Sequence[Sequence[int]]) -> None:
        self.allowed = [set(step) for step in allowed]
        self.accepted: list[int] = []

    def _next(self) -> set[int]:
        if len(self.accepted) < len(self.allowed):
            return self.allowed[len(self.accepted)]
        return {EOS} if len(self.accepted) == len(self.allowed) else set()

    def accept(self, token_ids: Sequence[int]) -> bool:
        for num, token_id in enumerate(token_ids):
            if token_id not in self._next():
                del self.accepted[len(self.accepted) - num :]
                return False
            self.accepted.append(token_id)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        before = len(self.accepted)
        while len(self.accepted) - before < len(token_ids):
            if not self.accept([token_ids[len(self.accepted) - before]]):
                break
        num = len(self.accepted) - before
        self.rollback(num)
        return num

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.accepted)
        del self.accepted[len(self.accepted) - num_tokens :]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        bits = sum(1 << token_id for token_id in self._next())
        bitmask[row, 0] = bits if bits < 2**31 else bits - 2**32

    @property
    def is_terminated(self) -> bool:
        return len(self.accepted) >= len(self.allowed)


EVEN = [range(0, VOCAB_SIZE, 2)] * 6


class OddsOnly(LogitsProcessor):
    """Makes odd tokens likelier; fails for those who say so."""

    def apply(self, batch: LogitsBatch) -> None:
        batch.logits[:, 1::2] += 2.0
        if any(extra_args for extra_args in batch.extra_args):
            raise ValueError("as it was told to")


def some_drafts(running: Running) -> list[int]:
    """As the model would have it, more or less."""
    return [int(model(running.tokens).argmax()), 3, 3][: len(running.tokens) % 4]


def every_kind() -> list[list[SamplingParams]]:
    """Batches of requests, side by side."""
    kinds = list(PARAMS.values())
    odd = SamplingParams(temperature=0.7, logits_processors=("odds",), logprobs=3)
    failing = msgspec.structs.replace(odd, temperature=0, extra_args={"fail": True})
    blocked = SamplingParams(allowed_token_ids=(EOS, 5), min_tokens=9)
    scored = [SamplingParams(temperature=0, logprobs=0), SamplingParams(logprobs=-1, top_k=3)]
    return [kinds[:6], kinds[6:], [odd, failing, blocked, *scored, SamplingParams(top_p=0.5)]]


def outcomes(gpu: Gpu | None, params: Sequence[SamplingParams], drafter: Drafter) -> list[Any]:
    """Of five steps: tokens, errors and log probabilities; then what the grammars accepted."""
    grammars = [ListGrammar(EVEN) if index % 3 == 1 else None for index in range(len(params))]
    harness = Harness(params, grammars=grammars, processors={"odds": (OddsOnly(), False)}, gpu=gpu)
    sampled = [harness.step(drafter) for _ in range(5)]
    return [
        [(one.token_ids, one.errors, one.error_fields) for one in sampled],
        [one.logprobs for one in sampled],
        [grammar.accepted for grammar in grammars if grammar],
    ]
