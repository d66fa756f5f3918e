"""Blocks of GGUF as weights: as stored where kernels execute that, else 8-bit blocks or dense."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from hotshoe.api import CheckpointTensor, LinearSpec, Quantization, Weight, WeightBuilder
from hotshoe_quantization.parts import PartChecklist
from hotshoe_quantization.q8_0 import q8_0_from_q5_0, quantize_q8_0

logger = logging.getLogger(__name__)

STORED = ("q4_0", "q4_1", "q8_0")
"""Formats that are kept: their weights have ``blocks`` uint8 ``[N, bytes per row]``, as in the
file.
"""
DENSE = ("float32", "float16", "bfloat16")


class GGUFQuantization(Quantization):
    """Weights in the formats of the file.

    Args:
        other_blocks: ``q8_0`` or ``dense``, what blocks become that aren't in ``STORED``.
    """

    def __init__(self, *, other_blocks: str) -> None:
        self._other_blocks = other_blocks
        self._num_loaded: Counter[tuple[str, str]] = Counter()

    def builder(self, spec: LinearSpec) -> WeightBuilder:
        return GGUFBuilder(spec, self._other_blocks, self._num_loaded)

    def finish(self) -> None:
        listed = [
            f"{number} {stored}" + ("" if stored == used else f" as {used}")
            for (stored, used), number in sorted(self._num_loaded.items())
        ]
        logger.info("quantization=gguf: weights are %s", ", ".join(listed))


class GGUFBuilder(WeightBuilder):
    """Collects the parts; neighbours of one format are merged, others become parts of the weight.

    Args:
        spec: of the layer.
        other_blocks: as for ``GGUFQuantization``.
        num_loaded: counts tensors by stored format and the format they got; written.
    """

    def __init__(
        self, spec: LinearSpec, other_blocks: str, num_loaded: Counter[tuple[str, str]]
    ) -> None:
        self._spec = spec
        self._other_blocks = other_blocks
        self._num_loaded = num_loaded
        self._checklist = PartChecklist(spec)
        self._weights: dict[str, tuple[str, Tensor]] = {}
        self._biases: dict[str, Tensor] = {}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        self._checklist.accept(part, tensor, is_bias=is_bias)
        if is_bias:
            self._biases[part] = tensor.to_dense(self._spec.dtype).to(self._spec.device)
            return
        used, values = self._read(tensor)
        self._weights[part] = used, values.to(self._spec.device)
        self._num_loaded[tensor.format, used] += 1

    def finalize(self) -> Weight:
        self._checklist.require_all()
        names = [name for name, _ in self._spec.parts]
        runs = [list(run) for _, run in groupby(names, lambda name: self._weights[name][0])]
        parts = tuple(self._merge(run) for run in runs)
        if len(parts) == 1:
            return parts[0]
        return Weight(
            format="mixed",
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors={},
            parts=parts,
        )

    def _read(self, tensor: CheckpointTensor) -> tuple[str, Tensor]:
        """A tensor in a format that kernels execute."""
        if tensor.format in STORED:
            return tensor.format, tensor.raw()
        if tensor.format in DENSE or self._other_blocks == "dense":
            return "dense", tensor.to_dense(self._spec.dtype)
        if tensor.format == "q5_0":
            return "q8_0", q8_0_from_q5_0(tensor.raw())
        return "q8_0", quantize_q8_0(tensor.to_dense(torch.float32))

    def _merge(self, names: list[str]) -> Weight:
        """One weight from parts of one format, which are let go."""
        formats, values = zip(*(self._weights.pop(name) for name in names), strict=True)
        tensors = {"weight" if formats[0] == "dense" else "blocks": _join(values)}
        if self._spec.has_bias:
            tensors["bias"] = _join([self._biases.pop(name) for name in names])
        rows = dict(self._spec.parts)
        return Weight(
            format=formats[0],
            out_features=sum(rows[name] for name in names),
            in_features=self._spec.in_features,
            tensors=tensors,
        )


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
