"""What EAGLE checkpoints differ in, read from ``config.json`` and the names of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotshoe.api import DraftCheckpoint, ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """One head.

    Attributes:
        is_eagle3: whether it reads three layers of the target, and a vocabulary of its own; EAGLE-1
            reads what the target's final norm makes of the last one.
        layer: config of its decoder layer, as in a Llama's ``config.json``.
        feature_layers: of the target, in the order in which the head reads them; as in
            ``Requirements.hidden_state_layers``.
        names: where the parts of the head lie in the checkpoint.
        tensors: shape by name.
        norm_before_residual: whether the residual stream starts from the normed feature.
        layernorms: whether an EAGLE-1 head norms the embedding, what the fusion gives before
            attention, and its output before the head.
    """

    is_eagle3: bool
    layer: Mapping[str, Any]
    feature_layers: tuple[int, ...]
    names: PartNames
    tensors: Mapping[str, tuple[int, ...]]
    norm_before_residual: bool
    layernorms: bool

    @property
    def kind(self) -> str:
        """For messages."""
        return "an EAGLE-3 head" if self.is_eagle3 else "an EAGLE-1 head"

    @property
    def hidden_size(self) -> int:
        """Of the head."""
        return _integer(self.layer, "hidden_size")

    @property
    def intermediate_size(self) -> int:
        """Of its MLP."""
        return _integer(self.layer, "intermediate_size")

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return _integer(self.layer, "num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Of keys and values."""
        return self.layer.get("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return self.layer.get("head_dim") or self.hidden_size // self.num_heads

    @property
    def rms_norm_eps(self) -> float:
        """Of every norm."""
        return float(self.layer.get("rms_norm_eps", 1e-6))

    def has(self, *names: str) -> bool:
        """Whether the checkpoint has all these tensors."""
        return all(name in self.tensors for name in names)

    @classmethod
    def read(cls, checkpoint: DraftCheckpoint, num_target_layers: int | None) -> EagleConfig:
        """Tell what kind of head a checkpoint holds.

        Args:
            checkpoint: opened.
            num_target_layers: None where the target's config doesn't tell.

        Raises:
            ModelLoadError: if it is none that is known.
        """
        config = checkpoint.config
        tensors = {tensor.name: tuple(tensor.shape) for tensor in checkpoint.tensors()}
        names = next((one for one in _LAYOUTS if one.fit(tensors)), None)
        if names is None:
            layouts = dict.fromkeys((one.fusion, f"{one.layer}*") for one in _LAYOUTS)
            known = "; ".join(f"{fusion!r} and {layer!r}" for fusion, layer in layouts)
            raise ModelLoadError(
                f"drafter {checkpoint.name!r} is no EAGLE head: known ones have tensors {known}"
            )
        layer = config.get("transformer_layer_config", config)
        _refuse_unsupported(checkpoint.name, config, layer, names, tensors)
        width = tensors[f"{names.fusion}.weight"][1]
        return cls(
            is_eagle3=names.is_eagle3,
            layer=layer,
            feature_layers=(
                _feature_layers(config, num_target_layers, width) if names.is_eagle3 else (-1,)
            ),
            names=names,
            tensors=tensors,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            layernorms=bool(config.get("layernorms", False)),
        )


@dataclass(frozen=True, slots=True)
class PartNames:
    """How a layout calls its parts.

    Attributes:
        fusion: the layer that features and embeddings, or features alone, come in through.
        layer: the decoder layer, with a final dot.
    """

    is_eagle3: bool
    fusion: str
    layer: str

    def fit(self, tensors: Mapping[str, Sequence[int]]) -> bool:
        """Whether a checkpoint with these tensors is of this layout."""
        needed = (f"{self.fusion}.weight", f"{self.layer}self_attn.q_proj.weight")
        has_norm = f"{self.layer}hidden_norm.weight" in tensors
        return all(name in tensors for name in needed) and has_norm is self.is_eagle3


_SPECULATORS_EAGLE1 = PartNames(False, "fusion_fc", "transformer.")
_LAYOUTS = (
    PartNames(True, "fc", "midlayer."),
    PartNames(True, "fc", "layers.0."),
    PartNames(False, "fc", "layers.0."),
    _SPECULATORS_EAGLE1,
)
_CHANGES_OF_EAGLE3 = ("norm_before_fc", "fc_norm", "norm_output")


def _integer(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if type(value) is not int or value < 1:
        raise ModelLoadError(
            f"drafter config field {field!r} must be a whole number of at least 1, got {value!r}"
        )
    return value


def _refuse_unsupported(
    name: str,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    names: PartNames,
    tensors: Mapping[str, Sequence[int]],
) -> None:
    activation = layer.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(
            f"drafter {name!r} has hidden_act {activation!r}, which is not supported; allowed: "
            "'silu'"
        )
    unsupported = [field for field in _CHANGES_OF_EAGLE3 if config.get(field)]
    if config.get("layernorms") and names is not _SPECULATORS_EAGLE1:
        unsupported.append("layernorms")
    if config.get("norm_before_residual") and not names.is_eagle3:
        unsupported.append("norm_before_residual")
    if unsupported:
        raise ModelLoadError(
            f"drafter {name!r} has {unsupported[0]} true, which is not supported for "
            f"{'EAGLE-3' if names.is_eagle3 else 'EAGLE-1'} heads with tensors {names.fusion!r} "
            f"and {names.layer + '...'!r}; allowed: false"
        )
    bias = f"{names.fusion}.bias"
    if bool(config.get("fusion_bias", bias in tensors)) is not (bias in tensors):
        raise ModelLoadError(
            f"drafter {name!r} has fusion_bias {config['fusion_bias']!r}, but "
            f"{'a' if bias in tensors else 'no'} tensor {bias!r}; correct its config.json"
        )
    num_layers = layer.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise ModelLoadError(
            f"drafter {name!r} has num_hidden_layers {num_layers!r}, which is not supported; "
            "allowed: 1"
        )


def _feature_layers(
    config: Mapping[str, Any], num_layers: int | None, width: int
) -> tuple[int, ...]:
    """From ids that count the embedding as layer 0 to ours."""
    field = "eagle_aux_hidden_state_layer_ids"
    ids = (config.get("eagle_config") or {}).get(field) or config.get(field)
    if ids is None:
        if num_layers is None:
            raise ModelLoadError(
                f"neither the drafter's {field} nor the target's num_hidden_layers is known; "
                f"add {field} to the drafter's config.json"
            )
        ids = (2, num_layers // 2, num_layers - 3)
    known = num_layers or max((one for one in ids if type(one) is int), default=0)
    if not ids or not all(type(one) is int and 1 <= one <= known for one in ids):
        raise ModelLoadError(
            f"the drafter reads layers {list(ids)!r} of the target, allowed: 1 to {known}; set "
            f"{field} in its config.json"
        )
    return tuple(one - 1 for one in ids)
