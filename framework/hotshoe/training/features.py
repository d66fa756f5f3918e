"""The target's hidden states over conversations: computed once, kept in shards on disk.

They come through the door that every drafter has: a proposer that asks for them and drafts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from hotshoe.api import DraftTokens, ProposeInput, Proposer, Requirements, SamplingParams
from hotshoe.training.conversations import SETTINGS_FILE, Conversation, settle

if TYPE_CHECKING:
    from hotshoe import LLM

AFTER_NORM = -1
SHARD_SIZE = 256
"""Conversations per shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One conversation with its hidden states. T=num_tokens H=hidden_size L=fused layers

    Attributes:
        token_ids: ``[T]`` int64.
        is_answer: ``[T]`` bool, whether the token is the assistant's.
        features: ``[T, L*H]`` bfloat16, outputs of the fused layers side by side.
        states: ``[T, H]`` bfloat16, after the final norm.
        is_greedy: whether the answers were decoded greedily.
        is_held_out: whether it is for measuring only.
    """

    token_ids: Tensor
    is_answer: Tensor
    features: Tensor
    states: Tensor
    is_greedy: bool
    is_held_out: bool

    def __len__(self) -> int:
        return len(self.token_ids)


class FeatureRecorder(Proposer):
    """Keeps the hidden states of every token that the engine computes, and drafts nothing.

    Args:
        layers: as in ``Requirements.hidden_state_layers``.
    """

    max_draft_tokens = 0

    def __init__(self, layers: Sequence[int]) -> None:
        self.requirements = Requirements(hidden_state_layers=tuple(layers))
        self._layers = tuple(layers)
        self._pieces: dict[str, list[Tensor]] = {}

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        bounds = inputs.query_start_loc
        for index, request_id in enumerate(inputs.request_ids):
            span = slice(int(bounds[index]), int(bounds[index + 1]))
            states = [inputs.hidden_states[layer][span] for layer in self._layers]
            # a copy: the engine may use the buffers again in the next step
            piece = torch.cat(states, dim=-1).to("cpu", torch.bfloat16)
            self._pieces.setdefault(request_id, []).append(piece)
        return DraftTokens(token_ids=[[] for _ in inputs.request_ids])

    def take(self, request_id: str) -> Tensor:
        """The states of a finished request, ``[num_tokens, layers * hidden_size]``."""
        return torch.cat(self._pieces.pop(f"{request_id}/0"))  # the engine numbers the choices


def fused_layers(num_layers: int) -> tuple[int, int, int]:
    """The three layers whose outputs a head fuses by default: early, middle, last."""
    return max(num_layers // 3, 1) - 1, max(2 * num_layers // 3, 1) - 1, num_layers - 1


class FeatureFolder:
    """Shards of examples.

    Args:
        path: made if needed.
        identity: model and layers; a folder that was made with others is refused.

    Raises:
        TrainingError: if the folder holds features of another model or other layers.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        settle(path / SETTINGS_FILE, identity)

    def shard(self, number: int) -> Path:
        """Where a shard lies."""
        return self.path / f"features-{number:05d}.safetensors"

    def holds(self, num_conversations: int) -> bool:
        """Whether all shards of so many conversations are there."""
        starts = range(0, num_conversations, SHARD_SIZE)
        return all(
            self.has(number, min(SHARD_SIZE, num_conversations - start))
            for number, start in enumerate(starts)
        )

    def has(self, number: int, num_conversations: int) -> bool:
        """Whether a shard is there with so many; added conversations make the last one grow."""
        if not self.shard(number).exists():
            return False
        with safe_open(self.shard(number), framework="pt") as file:
            held: int = file.get_slice("lengths").get_shape()[0]
        return held == num_conversations

    def write(self, number: int, conversations: Sequence[Conversation], states: Tensor) -> None:
        """Write a shard in one go: it is there whole or not at all."""
        tensors = {
            "states": states,
            "lengths": torch.tensor([len(one.token_ids) for one in conversations]),
            "token_ids": torch.tensor(
                [token for one in conversations for token in one.token_ids], dtype=torch.int32
            ),
            "is_answer": torch.cat([_is_answer(one) for one in conversations]),
            "is_greedy": torch.tensor([one.is_greedy for one in conversations]),
            "is_held_out": torch.tensor([one.is_held_out for one in conversations]),
        }
        part = self.shard(number).with_suffix(".part")
        save_file(tensors, part)
        part.replace(self.shard(number))

    def examples(self) -> Iterator[Example]:
        """All of them, in order; the tensors are views of files mapped into memory."""
        number = 0
        while self.shard(number).exists():
            yield from _examples(load_file(self.shard(number)))
            number += 1


def compute_features(
    llm: LLM,
    recorder: FeatureRecorder,
    conversations: Sequence[Conversation],
    folder: FeatureFolder,
    *,
    show_progress: bool = False,
) -> None:
    """Run conversations through the engine as prompts, and write shards that are missing.

    Args:
        llm: built with ``spec_decode=recorder`` and without prefix caching.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    shards = [
        conversations[start : start + SHARD_SIZE]
        for start in range(0, len(conversations), SHARD_SIZE)
    ]
    total = sum(len(one.token_ids) for one in conversations)
    with tqdm(total=total, desc="features", unit="tok", disable=not show_progress) as bar:
        for number, shard in enumerate(shards):
            if not folder.has(number, len(shard)):
                outputs = llm.generate([one.token_ids for one in shard], params)
                states = [recorder.take(output.request_id) for output in outputs]
                folder.write(number, shard, torch.cat(states))
            bar.update(sum(len(one.token_ids) for one in shard))


def _is_answer(conversation: Conversation) -> Tensor:
    marked = torch.zeros(len(conversation.token_ids), dtype=torch.bool)
    for start, end in conversation.answers:
        marked[start:end] = True
    return marked


def _examples(tensors: Mapping[str, Tensor]) -> Iterator[Example]:
    hidden_size = tensors["states"].shape[1] // 4
    start = 0
    for index, length in enumerate(tensors["lengths"].tolist()):
        span = slice(start, start + length)
        start += length
        yield Example(
            token_ids=tensors["token_ids"][span].long(),
            is_answer=tensors["is_answer"][span],
            features=tensors["states"][span, :-hidden_size],
            states=tensors["states"][span, -hidden_size:],
            is_greedy=bool(tensors["is_greedy"][index]),
            is_held_out=bool(tensors["is_held_out"][index]),
        )
