"""A drafter's tensors on their way from checkpoints into its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hotshoe.api import CheckpointTensor, DraftCheckpoint, DraftTarget, Model, ModelLoadError
from hotshoe.api.layers import Linear

Loads = dict[str, Callable[[CheckpointTensor], None]]
"""What to do with each tensor, by its name."""

D2T = "d2t"
T2D = "t2d"
_HARMLESS = ("rotary_emb.inv_freq", "rope_freqs.weight")
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class RowsOfTensor:
    """Some rows of a checkpoint's tensor, as a tensor of its own.

    Attributes:
        rows: ``[n]`` int64.
    """

    tensor: CheckpointTensor
    rows: Tensor

    @property
    def name(self) -> str:
        """Of the whole tensor."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.rows.shape[0], *self.tensor.shape[1:])

    @property
    def format(self) -> str:
        """Float32, whatever the tensor's: rows are taken of values, not of blocks."""
        return "float32"

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """The rows in a dtype."""
        return self.tensor.to_dense(dtype).index_select(0, self.rows)

    def raw(self) -> Tensor:
        """The rows in float32."""
        return self.to_dense(torch.float32)


def load_tensors(checkpoint: DraftCheckpoint, loads: Loads, *, what: str) -> None:
    """Feed every tensor of a checkpoint to the layer that it belongs to.

    Args:
        checkpoint: opened.
        loads: by tensor name.
        what: kind of drafter that the checkpoint is read as.

    Raises:
        ModelLoadError: if there are tensors that no layer takes.
    """
    unknown = []
    for tensor in checkpoint.tensors():
        load = loads.get(tensor.name)
        if load is None:
            unknown.append(tensor.name)
        else:
            load(tensor)
    _refuse(checkpoint, unknown, what=what)


def load_model(checkpoint: DraftCheckpoint, model: Model) -> None:
    """Feed every tensor of a checkpoint to a model.

    Raises:
        ModelLoadError: if there are tensors that it doesn't know.
    """
    _refuse(
        checkpoint,
        [one.name for one in checkpoint.tensors() if not model.load_tensor(one)],
        what="its architecture",
    )


def _refuse(checkpoint: DraftCheckpoint, names: Iterable[str], *, what: str) -> None:
    unknown = [name for name in names if not name.endswith(_HARMLESS)]
    if unknown:
        shown = ", ".join(map(repr, unknown[:5]))
        raise ModelLoadError(
            f"drafter {checkpoint.name!r} has {len(unknown)} tensors that {what} doesn't know: "
            f"{shown}{', ...' if len(unknown) > 5 else ''}; is it the right one?"
        )


def linear_loads(linear: Linear, names: Mapping[str, str]) -> Loads:
    """What to do with the tensors of one layer.

    Args:
        linear: the layer.
        names: where each of its parts lies in the checkpoint, without ``.weight`` and ``.bias``.
    """

    def load(part: str, is_bias: bool) -> Callable[[CheckpointTensor], None]:
        return lambda tensor: linear.load(part, tensor, is_bias=is_bias)

    loads: Loads = {}
    for part, name in names.items():
        loads[f"{name}.weight"] = load(part, False)
        if linear.spec.has_bias:
            loads[f"{name}.bias"] = load(part, True)
    return loads


def ignore(tensor: CheckpointTensor) -> None:
    """Take a tensor that says nothing new."""


def target_ids(tensors: Iterable[CheckpointTensor], vocab_size: int) -> Tensor | None:
    """The target's token id of each token of a draft vocabulary, ``[draft_vocab_size]`` int64; None
    where the checkpoint has no ``d2t``, which means that both vocabularies are one.

    Raises:
        ModelLoadError: if an id is none of the target's.
    """
    for tensor in tensors:
        if tensor.name == D2T:
            offsets = tensor.raw().to(torch.int64)
            ids = offsets + torch.arange(offsets.shape[0])
            strange = ids[(ids < 0) | (ids >= vocab_size)]
            if strange.numel():
                raise ModelLoadError(
                    f"{D2T!r} of the drafter names token id {int(strange[0])}, but the target has "
                    f"{vocab_size} tokens; was it trained for this model?"
                )
            return ids
    return None


def load_target_head(head: Linear, target: DraftTarget, rows: Tensor) -> None:
    """Give a drafter's head those rows of the target's head that its vocabulary consists of.

    Raises:
        ModelLoadError: if the target's checkpoint has no head by a known name.
    """
    with target.open_checkpoint() as checkpoint:
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors()}
        for name in _HEADS:
            if name in tensors:
                head.load("weight", RowsOfTensor(tensors[name], rows))
                return
        raise ModelLoadError(
            f"the drafter has no head of its own, and {checkpoint.name!r} has none of "
            f"{', '.join(map(repr, _HEADS))} to take it from"
        )
