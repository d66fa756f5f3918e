"""The oracle: transformers runs the model, and plain numpy says what follows from its logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe import SamplingParams
from hotshoe.testing.distributions import draw_by_noise
from hotshoe.weights.checkpoint import find_embedded_model
from hotshoe.worker.random import uniforms

MARGIN = 1e-4
"""Logits closer than this may change places by float noise."""

EDGE = 1e-5
"""A cumulated probability closer than this to top_p may be on either side of it."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """What ``generate`` of transformers returns.

    Attributes:
        token_ids: the output alone.
        margins: at each of its positions, how far the second logit is behind the first.
    """

    token_ids: list[int]
    margins: list[float]


@dataclass(frozen=True, slots=True)
class Draw:
    """What one uniform draws from a distribution.

    Attributes:
        token_id: the token.
        is_near_edge: whether float noise alone could lead to another one.
    """

    token_id: int
    is_near_edge: bool


class Oracle:
    """A causal language model of transformers, in float32."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()
        # what a model wants to stop at is the caller's business here
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self._greedy: dict[tuple[object, ...], Greedy] = {}
        self._draws: dict[tuple[object, ...], list[Draw]] = {}

    @classmethod
    def embedded(cls) -> Oracle:
        """The embedded model through transformers' own GGUF loader."""
        from transformers import AutoModelForCausalLM, GgufConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        path = find_embedded_model()
        return cls(
            AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
        )

    @classmethod
    def folder(cls, path: Path) -> Oracle:
        """A model folder."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    @torch.inference_mode()
    def greedy(
        self, prompt: Sequence[int], num_tokens: int, eos_token_id: int | None = None
    ) -> Greedy:
        """Greedy output; computed once per prompt."""
        key = tuple(prompt), num_tokens, eos_token_id
        if key not in self._greedy:
            found = self.model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=eos_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.cat(found.logits).topk(2).values
            self._greedy[key] = Greedy(
                found.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()
            )
        return self._greedy[key]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """``[num_tokens, vocab_size]`` logits after each token."""
        return self.model(torch.tensor([list(token_ids)])).logits[0].numpy()

    def draws(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        params: SamplingParams,
        seed: int,
        choice: int,
    ) -> list[Draw]:
        """What is to be drawn at each position of an output, given the tokens before it.

        Computed once for the same arguments.
        """
        key = tuple(prompt), tuple(output), msgspec.json.encode(params), seed, choice
        if key not in self._draws:
            logits = self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
            positions = np.arange(len(prompt), len(prompt) + len(output))
            seeds = np.full(len(output), seed, np.uint64)
            numbers = uniforms(seeds, np.full(len(output), choice, np.int64), positions)
            self._draws[key] = [
                draw(penalized(row, params, prompt, output[:index]), params, float(number))
                for index, (row, number) in enumerate(zip(logits, numbers, strict=True))
            ]
        return self._draws[key]


def penalized(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
) -> NDArray[np.float64]:
    """Repetition, presence and frequency penalties by their definitions."""
    values = logits.astype(np.float64)
    seen = np.unique([*prompt, *output])
    is_positive = values[seen] > 0
    penalty = params.repetition_penalty
    values[seen] = np.where(is_positive, values[seen] / penalty, values[seen] * penalty)
    counts = np.bincount(np.array(output, np.int64), minlength=len(values))
    return values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def draw(values: NDArray[np.float64], params: SamplingParams, uniform: float) -> Draw:
    """Temperature, top_k, top_p, min_p and the noise that the uniform is the key of."""
    order = np.argsort(-values, kind="stable")
    best = values[order]
    if params.temperature == 0:
        return Draw(int(order[0]), bool(best[0] - best[1] <= MARGIN))
    weights = np.exp((best - best[0]) / params.temperature)
    num_kept = params.top_k if 0 < params.top_k < len(values) else len(values)
    is_near_edge = num_kept < len(values) and best[num_kept - 1] - best[num_kept] <= MARGIN
    weights[num_kept:] = 0
    before = (np.cumsum(weights) - weights) / weights.sum()
    is_kept = weights > 0
    if params.top_p < 1:
        is_kept &= before < params.top_p
        is_near_edge |= np.abs(before[:num_kept] - params.top_p).min() <= EDGE
    if params.min_p > 0:
        is_kept &= weights >= params.min_p
        is_near_edge |= np.abs(weights[:num_kept] - params.min_p).min() <= MARGIN * params.min_p
    probabilities = np.zeros(len(values))
    probabilities[order[is_kept]] = weights[is_kept] / weights[is_kept].sum()
    found = draw_by_noise(probabilities, uniform)
    is_close = found.margin <= MARGIN / params.temperature
    return Draw(found.token_id, bool(is_near_edge or is_close))
