"""Which sizes of tiles are quickest for a layer on this GPU: measured once, and kept on disk."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hotshoe.api import AttentionSpec
from hotshoe_attention.triton.options import TritonAttentionOptions
from hotshoe_attention.triton.tiles import (
    LEAST,
    Gpu,
    Tile,
    decode_tile,
    padded_dim_of,
    prefill_tile,
)

logger = logging.getLogger(__name__)

Phase = Literal["prefill", "decode"]
Measure = Callable[[Phase, TritonAttentionOptions], float]
"""Seconds that a layer takes with such sizes; infinity if they don't work."""

_SIZES = {
    "prefill": ("block_m", "block_n", "num_warps", "num_stages"),
    "decode": ("block_n", "num_warps", "num_stages"),
}


class KeptSizes:
    """A file of what was measured; one that can't be read or written is as good as none.

    Args:
        path: of the file, which is for one GPU and one version of Triton.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def on_this_machine(cls, folder: Path, gpu_name: str, triton_version: str) -> KeptSizes:
        """The file for a GPU and a version of Triton."""
        name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu_name} triton {triton_version}".lower())
        return cls(folder / "hotshoe" / f"attention-{name}.json")

    def get(self, key: str) -> dict[str, int] | None:
        """Sizes that were kept under a key; None = it's to be measured."""
        sizes = self._read().get(key)
        if not isinstance(sizes, dict) or not all(type(one) is int for one in sizes.values()):
            return None
        return sizes

    def put(self, key: str, sizes: Mapping[str, int]) -> None:
        """Keep sizes; other processes may do so at the same time, and one of them wins."""
        known = self._read() | {key: dict(sizes)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(known, file, indent=1, sort_keys=True)
            os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("attention: sizes that were measured can't be kept: %s", error)

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("attention: %s is measured anew: %s", self._path, error)
            return {}
        return known if isinstance(known, dict) else {}


def tuned(
    spec: AttentionSpec,
    gpu: Gpu,
    options: TritonAttentionOptions,
    kept: KeptSizes,
    measure: Measure,
) -> TritonAttentionOptions:
    """Options with the sizes that are quickest for a layer. Where one is given for prompts, or for
    decoding, nothing is measured for these.
    """
    for phase in ("prefill", "decode"):
        names = [f"{phase}_{size}" for size in _SIZES[phase]]
        if any(getattr(options, name) is not None for name in names):
            continue
        key = f"{phase} {spec}"
        sizes = kept.get(key)
        if sizes is None or set(sizes) != set(names):
            sizes = _quickest(phase, _candidates(phase, spec, gpu), options, measure)
            kept.put(key, sizes)
        options = options.model_copy(update=sizes)
    return options


def _quickest(
    phase: Phase, candidates: Sequence[Tile], options: TritonAttentionOptions, measure: Measure
) -> dict[str, int]:
    best, least_s = {}, float("inf")
    for index, tile in enumerate(candidates):
        sizes = {f"{phase}_{size}": getattr(tile, size) for size in _SIZES[phase]}
        seconds = measure(phase, options.model_copy(update=sizes))
        logger.debug("attention: %s takes %.1f us", sizes, 1e6 * seconds)
        # the first is the usual one, which stays if nothing works
        if not index or seconds < least_s:
            best, least_s = sizes, seconds
    logger.info("attention: %s is quickest, %.1f us", best, 1e6 * least_s)
    return best


def _candidates(phase: Phase, spec: AttentionSpec, gpu: Gpu) -> list[Tile]:
    """The usual tile, and others like it."""
    usual_options = TritonAttentionOptions()
    itemsize, padded = padded_dim_of(spec)
    if phase == "decode":
        usual = decode_tile(gpu, itemsize, padded, usual_options)
        others = [
            replace(usual, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
            for block_n in (usual.block_n // 2, usual.block_n, usual.block_n * 2)
            for num_warps in (2, 4, 8)
            for num_stages in (3, 5, 7)
        ]
    else:
        rows = spec.num_heads // spec.kv.num_kv_heads
        usual = prefill_tile(gpu, itemsize, padded, usual_options, rows=rows)
        others = [
            replace(usual, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=stages)
            for block_m in (usual.block_m // 2, usual.block_m)
            for block_n in (usual.block_n // 2, usual.block_n, usual.block_n * 2)
            for num_warps in (4, 8)
            for stages in (3, 5)
        ]
    fitting = [
        tile
        for tile in others
        if tile.block_n >= LEAST
        and tile.block_m >= LEAST
        and tile.shared_bytes(itemsize, padded) <= gpu.shared_bytes
    ]
    return [usual, *(tile for tile in fitting if tile != usual)]
