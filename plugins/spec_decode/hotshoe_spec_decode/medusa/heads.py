"""Medusa's heads: residual blocks over one hidden state, and the matrices behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hotshoe.api import DraftCheckpoint, DraftTarget, ModelLoadError
from hotshoe.api.layers import LayerFactory, Linear
from hotshoe_spec_decode.weights import (
    D2T,
    T2D,
    Loads,
    ignore,
    linear_loads,
    load_target_head,
    load_tensors,
    target_ids,
)

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.proj\.weight")
_MATRIX = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """What a checkpoint holds.

    Attributes:
        has_matrices: whether each head has a matrix of its own; if not they share the target's.
        tensors: shape by name.
    """

    num_heads: int
    num_blocks: int
    has_matrices: bool
    tensors: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, checkpoint: DraftCheckpoint) -> MedusaConfig:
        """Tell from the names of the tensors; ``config.json`` of published heads is often wrong.

        Raises:
            ModelLoadError: if it holds no Medusa heads.
        """
        tensors = {tensor.name: tuple(tensor.shape) for tensor in checkpoint.tensors()}
        blocks = {
            tuple(map(int, found.groups())) for found in map(_BLOCK.fullmatch, tensors) if found
        }
        matrices = {
            tuple(map(int, found.groups())) for found in map(_MATRIX.fullmatch, tensors) if found
        }
        if not blocks:
            raise ModelLoadError(
                f"drafter {checkpoint.name!r} holds no Medusa heads: known ones have tensors "
                "'0.0.linear.weight'"
            )
        num_heads = 1 + max(head for head, _ in blocks)
        num_blocks = 1 + max(block for _, block in blocks)
        expected = {(head, block) for head in range(num_heads) for block in range(num_blocks)}
        all_matrices = {(head, num_blocks) for head in range(num_heads)}
        if blocks != expected or (matrices and matrices != all_matrices):
            raise ModelLoadError(
                f"drafter {checkpoint.name!r} has {num_heads} Medusa heads that are not alike; "
                f"expected {num_blocks} blocks in each, and a matrix in all of them or in none"
            )
        return cls(
            num_heads=num_heads,
            num_blocks=num_blocks,
            has_matrices=bool(matrices),
            tensors=tensors,
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """``x + proj(silu(linear(x)))``, or without ``proj`` as published ones are."""

    linear: Linear
    proj: Linear | None


class MedusaHeads:
    """The first ``num_heads`` heads of a checkpoint.

    Every op is one of the kernels', so that kernels can record a pass.
    """

    def __init__(
        self,
        config: MedusaConfig,
        target: DraftTarget,
        layers: LayerFactory,
        *,
        num_heads: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self._target = target
        self._kernels = layers.kernels
        self._device = device
        self._hidden_size = target.model.hidden_size
        self._check_sizes()
        self.blocks = [
            [self._block(layers, head, block) for block in range(config.num_blocks)]
            for head in range(num_heads)
        ]
        self.matrices: list[Linear] = []
        if config.has_matrices:
            self.matrices = [
                layers.linear(
                    name, self._hidden_size, config.tensors[f"{name}.weight"][0], is_head=True
                )
                for name in (f"{head}.{config.num_blocks}" for head in range(num_heads))
            ]
        elif D2T in config.tensors:
            rows = config.tensors[D2T][0]
            self.matrices = [layers.linear("lm_head", self._hidden_size, rows, is_head=True)]
        self._target_ids: Tensor | None = None

    def _check_sizes(self) -> None:
        size, tensors = self._hidden_size, self.config.tensors
        for name, shape in tensors.items():
            if found := _BLOCK.fullmatch(name):
                proj = f"{found[1]}.{found[2]}.proj.weight"
                width = shape[0] if proj in tensors else size
                self._check_shape(name, (width, size) if name.endswith(".weight") else (width,))
                if proj in tensors:
                    self._check_shape(proj, (size, width))

    def _check_shape(self, name: str, needed: tuple[int, ...]) -> None:
        shape = self.config.tensors[name]
        if shape != needed:
            raise ModelLoadError(
                f"tensor {name!r} of the drafter has shape {shape}, but the target's "
                f"hidden_size {self._hidden_size} needs {needed}; was it trained for this model?"
            )

    def _block(self, layers: LayerFactory, head: int, block: int) -> _Block:
        name, size, tensors = f"{head}.{block}", self._hidden_size, self.config.tensors
        width = tensors[f"{name}.linear.weight"][0]
        has_bias = f"{name}.linear.bias" in tensors
        return _Block(
            linear=layers.linear(f"{name}.linear", size, width, has_bias=has_bias),
            proj=(
                layers.linear(f"{name}.proj", width, size)
                if f"{name}.proj.weight" in tensors
                else None
            ),
        )

    def load(self, path: str) -> None:
        """Read the checkpoint, and what it leaves to the target.

        Raises:
            ModelLoadError: if a tensor is missing, unknown or doesn't fit.
        """
        config, target = self.config, self._target
        with target.open_checkpoint(path) as checkpoint:
            ids = target_ids(checkpoint.tensors(), target.model.vocab_size)
            load_tensors(checkpoint, self._loads(), what="a set of Medusa heads")
        num_tokens = target.model.vocab_size if ids is None else ids.shape[0]
        for matrix in self.matrices:
            if matrix.spec.out_features != num_tokens:
                raise ModelLoadError(
                    f"tensor '{matrix.spec.name}.weight' of the drafter has "
                    f"{matrix.spec.out_features} rows, but "
                    f"{'the target' if ids is None else repr(D2T)} has {num_tokens} tokens"
                )
        if ids is not None:
            self._target_ids = ids.view(-1, 1).to(self._device)
            if not config.has_matrices:
                load_target_head(self.matrices[0], target, ids)

    def _loads(self) -> Loads:
        loads: Loads = {D2T: ignore, T2D: ignore}
        # heads that aren't used are known all the same
        for name in self.config.tensors:
            if any(one.fullmatch(name) for one in (_BLOCK, _PROJECTION, _MATRIX)):
                loads[name] = ignore
        used: list[Linear] = []
        for block in (block for head in self.blocks for block in head):
            used += [block.linear] if block.proj is None else [block.linear, block.proj]
        if self.config.has_matrices:
            used += self.matrices
        for linear in used:
            loads |= linear_loads(linear, {"weight": linear.spec.name})
        return loads

    @property
    def token_ids(self) -> Tensor | None:
        """What the columns of the logits stand for, ``[width]`` int64; None = the token of the same
        number.
        """
        return None if self._target_ids is None else self._target_ids.view(-1)

    def logits(self, hidden: Tensor, num_heads: int) -> list[Tensor]:
        """``[n, hidden_size]`` to logits of the first heads, ``[n, width]`` for each; where they
        share one matrix they go through it together: one tensor ``[n * num_heads, width]``, row by
        row of all heads.
        """
        states = [self._state(head, hidden) for head in self.blocks[:num_heads]]
        if self.config.has_matrices:
            matrices = self.matrices[:num_heads]
            return [matrix.logits(state) for matrix, state in zip(matrices, states, strict=True)]
        rows = states[0]
        if num_heads > 1:
            rows = self._kernels.concat(states).view(-1, self._hidden_size)
        if self.matrices:
            return [self.matrices[0].logits(rows)]
        return [self._target.model.compute_logits(rows)]

    def most_likely(self, hidden: Tensor, num_heads: int) -> Tensor:
        """``[n, hidden_size]`` to token ids of the target, ``[n * num_heads]`` int64."""
        kernels = self._kernels
        columns = [kernels.argmax(logits) for logits in self.logits(hidden, num_heads)]
        ids = columns[0]
        if len(columns) > 1:
            ids = kernels.concat([column.view(-1, 1) for column in columns]).view(-1)
        return (
            ids if self._target_ids is None else kernels.take_rows(self._target_ids, ids).view(-1)
        )

    def _state(self, blocks: list[_Block], x: Tensor) -> Tensor:
        kernels = self._kernels
        for block in blocks:
            found = kernels.silu(block.linear(x))
            x = kernels.add(x, found if block.proj is None else block.proj(found))
        return x
