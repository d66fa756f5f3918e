"""Rows of weights as 8-bit integers with one scale each.

Symmetric quantization by output channel (arXiv:1806.08342): ``scale = max|w| / 127``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from hotshoe.api import (
    CheckpointTensor,
    ConfigError,
    LinearSpec,
    ModelLoadError,
    Quantization,
    Weight,
    WeightBuilder,
)
from hotshoe_quantization.dense import DenseBuilder, write_rows
from hotshoe_quantization.parts import PartChecklist

logger = logging.getLogger(__name__)

GROUP_SIZE = 32
"""Activations are quantized in groups of this size, so layers of another width stay dense."""

_CHUNK_SIZE = 1 << 20
_MAX_SHOWN = 5


class Int8Quantization(Quantization):
    """``int8`` for every layer whose width allows it, but those that were asked to stay dense."""

    def __init__(self, keep_dense: Sequence[str]) -> None:
        self._unused_patterns = dict.fromkeys(keep_dense)
        self._patterns = tuple(keep_dense)
        self._dense: dict[str, str] = {}

    def builder(self, spec: LinearSpec) -> WeightBuilder:
        matching = [one for one in self._patterns if fnmatchcase(spec.name, one)]
        for pattern in matching:
            self._unused_patterns.pop(pattern, None)
        if matching:
            self._dense[spec.name] = f"keep_dense has {matching[0]!r}"
        elif spec.in_features % GROUP_SIZE:
            self._dense[spec.name] = f"{spec.in_features} inputs are no multiple of {GROUP_SIZE}"
        else:
            return Int8Builder(spec)
        return DenseBuilder(spec)

    def finish(self) -> None:
        if self._unused_patterns:
            raise ConfigError(
                f"quantization.options.keep_dense: no layer has a name like "
                f"{', '.join(map(repr, self._unused_patterns))}; remove it, or take the name from "
                "the model's checkpoint"
            )
        if self._dense:
            shown = [f"{name} ({why})" for name, why in self._dense.items()][:_MAX_SHOWN]
            more = f" and {len(self._dense) - _MAX_SHOWN} others" * (len(self._dense) > _MAX_SHOWN)
            logger.info("quantization=int8: dense are %s%s", ", ".join(shown), more)


class Int8Builder(WeightBuilder):
    """Quantizes each part into its rows as it comes; of dense values there is one tensor at a time.

    The weight has ``weight`` int8 ``[N, K]``, ``scales`` float32 ``[N]``, and maybe a dense
    ``bias`` ``[N]``.
    """

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._checklist = PartChecklist(spec)
        self._tensors: dict[str, Tensor] = {}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        rows = self._checklist.accept(part, tensor, is_bias=is_bias)
        if is_bias:
            write_rows(self._tensors, "bias", rows, tensor, self._spec)
            return
        if "weight" not in self._tensors:
            num_rows, device = self._spec.out_features, self._spec.device
            self._tensors["weight"] = torch.empty(
                num_rows, self._spec.in_features, dtype=torch.int8, device=device
            )
            self._tensors["scales"] = torch.empty(num_rows, dtype=torch.float32, device=device)
        weight, scales = self._tensors["weight"][rows], self._tensors["scales"][rows]
        quantize_rows(tensor.to_dense(torch.float32), weight, scales)
        if not scales.isfinite().all():
            raise ModelLoadError(
                f"tensor {tensor.name!r} has values that are infinite or not numbers, which can't "
                "be quantized; the checkpoint is damaged"
            )

    def finalize(self) -> Weight:
        self._checklist.require_all()
        return Weight(
            format="int8",
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors=self._tensors,
        )


def quantize_rows(values: Tensor, weight: Tensor, scales: Tensor) -> None:
    """Fill in what approximates ``values`` as ``weight * scales``.

    Args:
        values: ``[N, K]`` float32, not modified.
        weight: ``[N, K]`` int8, written.
        scales: ``[N]`` float32, written; 0 for rows of zeros.
    """
    step = max(_CHUNK_SIZE // values.shape[1], 1)
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        scale = values[rows].abs().amax(-1) / 127
        divisor = torch.where(scale > 0, scale, 1.0)
        weight[rows] = (values[rows] / divisor[:, None]).round_().clamp_(-127, 127)
        scales[rows] = scale
