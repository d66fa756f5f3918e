"""Which tensors of a layer have come, whether they fit, and which rows are theirs."""

from __future__ import annotations

from hotshoe.api import CheckpointTensor, LinearSpec, ModelLoadError


class PartChecklist:
    """The weights and biases that a layer waits for."""

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._rows: dict[str, slice] = {}
        start = 0
        for part, num_rows in spec.parts:
            self._rows[part] = slice(start, start + num_rows)
            start += num_rows
        kinds = ("weight", "bias") if spec.has_bias else ("weight",)
        self._missing = {(kind, part) for kind in kinds for part in self._rows}

    def accept(self, part: str, tensor: CheckpointTensor, *, is_bias: bool) -> slice:
        """Tick a tensor off.

        Returns:
            The rows of the whole layer that it fills.

        Raises:
            ModelLoadError: if the layer has no such part, or has it already, or the shape is wrong.
        """
        name, kind = self._spec.name, "bias" if is_bias else "weight"
        if part not in self._rows:
            raise ModelLoadError(
                f"{name!r} has no part {part!r} for tensor {tensor.name!r}; parts: "
                f"{list(self._rows)}"
            )
        if is_bias and not self._spec.has_bias:
            raise ModelLoadError(f"tensor {tensor.name!r}: {name!r} was declared without a bias")
        if (kind, part) not in self._missing:
            raise ModelLoadError(
                f"tensor {tensor.name!r}: {kind} of {part!r} in {name!r} came twice"
            )
        rows = self._rows[part]
        num_rows = rows.stop - rows.start
        expected = (num_rows,) if is_bias else (num_rows, self._spec.in_features)
        if tuple(tensor.shape) != expected:
            raise ModelLoadError(
                f"tensor {tensor.name!r} has shape {tuple(tensor.shape)}, but {part!r} of {name!r} "
                f"needs {expected}"
            )
        self._missing.discard((kind, part))
        return rows

    def require_all(self) -> None:
        """Check that nothing is missing.

        Raises:
            ModelLoadError: naming what is.
        """
        if self._missing:
            lacking = ", ".join(f"{kind} of {part!r}" for kind, part in sorted(self._missing))
            raise ModelLoadError(
                f"{self._spec.name!r} is incomplete: the checkpoint has no {lacking}"
            )
