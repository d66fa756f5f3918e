"""Weights as 8-bit integers with a scale for 32 of them, or for a row.

Symmetric quantization (arXiv:1806.08342): ``scale = max|w| / 127``. Errors of the head go straight
into the probabilities, so it never has scales for whole rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
from hotshoe_quantization.dense import DenseBuilder, fill_rows
from hotshoe_quantization.parts import PartChecklist
from hotshoe_quantization.q8_0 import BLOCK_SIZE, quantize_q8_0

logger = logging.getLogger(__name__)

_CHUNK_SIZE = 1 << 20
_MAX_SHOWN = 5


class Int8Quantization(Quantization):
    """8 bits for every layer whose width allows it.

    Args:
        scales: ``group`` or ``row``.
        keep_dense: patterns of the names of layers that stay dense.
    """

    def __init__(self, *, scales: str, keep_dense: Sequence[str]) -> None:
        self._scales = scales
        self._unused_patterns = dict.fromkeys(keep_dense)
        self._patterns = tuple(keep_dense)
        self._dense: dict[str, str] = {}

    def builder(self, spec: LinearSpec) -> WeightBuilder:
        matching = [one for one in self._patterns if fnmatchcase(spec.name, one)]
        for pattern in matching:
            self._unused_patterns.pop(pattern, None)
        if matching:
            self._dense[spec.name] = f"keep_dense has {matching[0]!r}"
        elif spec.in_features % BLOCK_SIZE:
            # kernels quantize activations in groups of as many
            self._dense[spec.name] = f"{spec.in_features} inputs are no multiple of {BLOCK_SIZE}"
        elif self._scales == "group" or spec.is_embedding or spec.is_head:
            return Int8Builder(spec, "q8_0", _quantize_blocks)
        else:
            return Int8Builder(spec, "int8", _quantize_rows)
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

    Args:
        spec: of the layer.
        weight_format: ``int8``, whose weights have ``weight`` int8 ``[N, K]`` and ``scales``
            float32 ``[N]``, or ``q8_0``, whose weights have ``blocks`` uint8 ``[N, K / 32 * 34]``.
            Either may have a dense ``bias`` ``[N]``.
        quantize: float32 ``[N, K]`` to these tensors.
    """

    def __init__(
        self,
        spec: LinearSpec,
        weight_format: str,
        quantize: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        self._spec = spec
        self._format = weight_format
        self._quantize = quantize
        self._checklist = PartChecklist(spec)
        self._tensors: dict[str, Tensor] = {}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        rows = self._checklist.accept(part, tensor, is_bias=is_bias)
        if is_bias:
            found = {"bias": tensor.to_dense(self._spec.dtype)}
        else:
            values = tensor.to_dense(torch.float32)
            if not torch.stack(torch.aminmax(values)).isfinite().all():
                raise ModelLoadError(
                    f"tensor {tensor.name!r} has values that are infinite or no numbers, which "
                    "can't be quantized; the checkpoint is damaged, download it again"
                )
            found = self._quantize(values)
        for name, one in found.items():
            fill_rows(self._tensors, name, rows, one, self._spec)

    def finalize(self) -> Weight:
        self._checklist.require_all()
        return Weight(
            format=self._format,
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors=self._tensors,
        )


def _quantize_rows(values: Tensor) -> dict[str, Tensor]:
    weight = torch.empty_like(values, dtype=torch.int8)
    scales = values.new_empty(values.shape[0])
    step = max(_CHUNK_SIZE // values.shape[1], 1)
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        scale = values[rows].abs().amax(-1) / 127
        divisor = torch.where(scale > 0, scale, 1.0)
        weight[rows] = (values[rows] / divisor[:, None]).round_().clamp_(-127, 127)
        scales[rows] = scale
    return {"weight": weight, "scales": scales}


def _quantize_blocks(values: Tensor) -> dict[str, Tensor]:
    return {"blocks": quantize_q8_0(values)}
