"""What models and draft heads are built from: linear, norm, embedding and attention layers over
kernels and attention plugins.

Layers are plain callables, not ``nn.Module``: their weights have formats of their own and are not
parameters to optimise. Unlike the rest of ``hotshoe.api`` this module imports torch.
"""

# T=num_tokens N=num_heads K=num_kv_heads H=head_dim

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hotshoe.api.attention import AttentionBackend, AttentionSpec, KVCacheSpec, LayerCache
from hotshoe.api.kernels import Kernels, Weight
from hotshoe.api.quantization import CheckpointTensor, LinearSpec, Quantization, WeightBuilder
from hotshoe.errors import ModelLoadError


class ForwardStep:
    """What the attention layers of one forward pass need, and what a drafter wants out of it.

    Attributes:
        metadata: by cache group, from ``AttentionBackend.build_metadata``.
        caches: by layer index.
        hidden_states: filled in by the model, by layer, for the layers asked for.
        wanted_rows: ``[n]`` int64, the only tokens whose final hidden states are looked at, in
            order: of each request its last ones, or none; None = all tokens.
        wanted_metadata: builds metadata of a cache group for no other queries than
            ``wanted_rows``; None if the backend attends from all tokens.
    """

    __slots__ = (
        "_captured_layers",
        "caches",
        "hidden_states",
        "metadata",
        "wanted_metadata",
        "wanted_rows",
    )

    def __init__(
        self,
        metadata: Sequence[Any],
        caches: Sequence[LayerCache],
        captured_layers: frozenset[int] = frozenset(),
        wanted_rows: Tensor | None = None,
        wanted_metadata: Callable[[int], Any] | None = None,
    ) -> None:
        self.metadata = metadata
        self.caches = caches
        self.wanted_rows = wanted_rows
        self.wanted_metadata = wanted_metadata
        self.hidden_states: dict[int, Tensor] = {}
        self._captured_layers = captured_layers

    def wants(self, layer_index: int) -> bool:
        """Whether the output of a layer (-1 = after the final norm) is to be stored in
        ``hidden_states``.
        """
        return layer_index in self._captured_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedTensor:
    """A tensor that a layer still needs.

    Attributes:
        name: of the layer, and of its part if there are several.
        role: what it is to the layer; an embedding's table is a ``weight``.
        device: where the layer keeps it.
        load: takes it.
    """

    name: str
    shape: tuple[int, ...]
    role: Literal["weight", "bias", "norm", "sinks"]
    device: torch.device
    load: Callable[[CheckpointTensor], None]


class LoadedWeight:
    """Tensors on their way from the checkpoint over the quantization method to the kernels; in the
    end one weight, which several layers may use.
    """

    def __init__(self, spec: LinearSpec, quantization: Quantization, kernels: Kernels) -> None:
        self.spec = spec
        self.is_executed_by: dict[str, tuple[str, ...]] = {}
        self._kernels = kernels
        self._builder: WeightBuilder | None = quantization.builder(spec)
        self._weight: Weight | None = None
        kinds = (False, True) if spec.has_bias else (False,)
        self._missing = {(name, is_bias) for name, _ in spec.parts for is_bias in kinds}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        """Take one part's weight or bias, and with the last of them build, check and prepare the
        weight: what is prepared as it comes needs no memory for two models.
        """
        if self._builder is None:
            raise ModelLoadError(f"tensor {tensor.name!r} for {self.spec.name!r} came twice")
        self._builder.load(part, tensor, is_bias=is_bias)
        self._missing.discard((part, is_bias))
        if not self._missing:
            self._settle(self._builder.finalize())

    def awaited(self) -> Iterator[AwaitedTensor]:
        """What has not come yet."""
        rows = dict(self.spec.parts)
        for part, is_bias in sorted(self._missing):
            name = self.spec.name if part == "weight" else f"{self.spec.name}.{part}"
            shape = (rows[part],) if is_bias else (rows[part], self.spec.in_features)
            yield AwaitedTensor(
                name=f"{name}.bias" if is_bias else f"{name}.weight",
                shape=shape,
                role="bias" if is_bias else "weight",
                device=self.spec.device,
                load=partial(self.load, part, is_bias=is_bias),
            )

    def require(self) -> Weight:
        """The weight as the kernels have prepared it, once everything was loaded."""
        lacking = sorted(name for name, is_bias in self._missing if not is_bias)
        if lacking:
            raise ModelLoadError(
                f"the checkpoint has no weight for {lacking} of {self.spec.name!r}"
            )
        if self._builder is not None:
            self._settle(self._builder.finalize())
        return self.weight

    def _settle(self, weight: Weight) -> None:
        for op, formats in self.is_executed_by.items():
            self._check(weight, op, formats)
        self._builder = None
        self._weight = self._kernels.prepare_weight(weight)

    @property
    def weight(self) -> Weight:
        """As the kernels have prepared it."""
        if self._weight is None:
            raise ModelLoadError(f"the weight of {self.spec.name!r} is not loaded")
        return self._weight

    def _check(self, weight: Weight, op: str, formats: tuple[str, ...]) -> None:
        unknown = sorted(weight.formats.difference(formats))
        if unknown:
            raise ModelLoadError(
                f"the weight of {self.spec.name!r} has format {', '.join(map(repr, unknown))}, but "
                f"{op} of {type(self._kernels).__name__} executes only "
                f"{', '.join(map(repr, formats))}; choose other kernels or another quantization"
            )


class Linear:
    """``x W^T + b``, possibly several projections merged by rows. Call it with ``[num_tokens,
    in_features]``.
    """

    def __init__(self, spec: LinearSpec, quantization: Quantization, kernels: Kernels) -> None:
        self.spec = spec
        self._kernels = kernels
        self._use(LoadedWeight(spec, quantization, kernels))
        self._weight: Weight | None = None

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        """Take one part's weight or bias. When all have come, ``finalize`` still has to be called.

        Raises:
            ModelLoadError: if it doesn't fit, or the kernels don't execute the weight's format.
        """
        self._loaded.load(part, tensor, is_bias=is_bias)

    def tie(self, embedding: Embedding) -> None:
        """Use the weight of an embedding, whatever its format, instead of one of its own.

        Raises:
            ModelLoadError: if the embedding has another shape, or this layer a bias.
        """
        own, other = self.spec, embedding.loaded.spec
        if own.has_bias or (own.out_features, own.in_features) != (
            other.out_features,
            other.in_features,
        ):
            raise ModelLoadError(
                f"{own.name!r} ({own.out_features} x {own.in_features}, "
                f"{'with' if own.has_bias else 'without'} bias) can't be tied to {other.name!r} "
                f"({other.out_features} x {other.in_features})"
            )
        self._use(embedding.loaded)

    def awaited(self) -> Iterator[AwaitedTensor]:
        """What has not come yet."""
        return self._loaded.awaited()

    def finalize(self) -> None:
        """Check that every part has come.

        Raises:
            ModelLoadError: if one is missing.
        """
        self._weight = self._loaded.require()

    def _use(self, loaded: LoadedWeight) -> None:
        self._loaded = loaded
        loaded.is_executed_by["linear"] = self._kernels.capabilities.weight_formats

    @property
    def weight(self) -> Weight:
        """The finished weight.

        Raises:
            ModelLoadError: before ``finalize``.
        """
        return self._loaded.weight

    def __call__(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        return self._kernels.linear(x, self._weight)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up``, if the projections merged are a gate and one as wide; see
        ``Kernels.linear_silu_and_mul``.
        """
        assert self._weight is not None
        return self._kernels.linear_silu_and_mul(x, self._weight)

    def logits(self, x: Tensor) -> Tensor:
        """What a head gives; see ``Kernels.logits``."""
        assert self._weight is not None
        return self._kernels.logits(x, self._weight)


class RMSNorm:
    """Root-mean-square norm with a learned scale; see ``Kernels.rms_norm``."""

    def __init__(
        self,
        name: str,
        size: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.name = name
        self.eps = eps
        self._shape = (size,)
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._weight: Tensor | None = None

    def load(self, tensor: CheckpointTensor) -> None:
        """Take the scale, ``[size]``."""
        self._weight = _dense(tensor, self._shape, self._dtype, self._device, self.name)

    def awaited(self) -> Iterator[AwaitedTensor]:
        """The scale, unless it has come."""
        if self._weight is None:
            yield AwaitedTensor(
                name=f"{self.name}.weight",
                shape=self._shape,
                role="norm",
                device=self._device,
                load=self.load,
            )

    def finalize(self) -> None:
        """Check that the scale has come."""
        if self._weight is None:
            raise ModelLoadError(f"the checkpoint has no weight for {self.name!r}")

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self._weight is not None
        return self._kernels.rms_norm(x, self._weight, self.eps, residual)


class Embedding:
    """Token ids ``[num_tokens]`` to vectors ``[num_tokens, hidden_size]``.

    Attributes:
        loaded: the weight, to be used by a tied head too.
    """

    def __init__(self, spec: LinearSpec, quantization: Quantization, kernels: Kernels) -> None:
        self.name = spec.name
        self.loaded = LoadedWeight(spec, quantization, kernels)
        self.loaded.is_executed_by["embedding"] = kernels.capabilities.embedding_formats
        self._kernels = kernels
        self._weight: Weight | None = None

    def load(self, tensor: CheckpointTensor) -> None:
        """Take the table, ``[vocab_size, hidden_size]``.

        Raises:
            ModelLoadError: if it doesn't fit, or the kernels don't look up rows in its format.
        """
        self.loaded.load("weight", tensor)

    def awaited(self) -> Iterator[AwaitedTensor]:
        """The table, unless it has come."""
        return self.loaded.awaited()

    def finalize(self) -> None:
        """Check that the table has come.

        Raises:
            ModelLoadError: if it is missing.
        """
        self._weight = self.loaded.require()

    @property
    def weight(self) -> Weight:
        """The finished weight.

        Raises:
            ModelLoadError: before ``finalize``.
        """
        return self.loaded.weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        assert self._weight is not None
        return self._kernels.embedding(token_ids, self._weight)


class Attention:
    """One attention layer; the backend is bound at assembly, when every layer's spec is known."""

    def __init__(
        self,
        layer_index: int,
        spec: AttentionSpec,
        *,
        kernels: Kernels,
        cos_sin: tuple[Tensor, Tensor] | None,
        device: torch.device,
    ) -> None:
        self.layer_index = layer_index
        self.spec = spec
        self.cos_sin = cos_sin
        self.sinks: Tensor | None = None
        self.group = 0
        self._device = device
        self._kernels = kernels
        self._backend: AttentionBackend | None = None
        self._rotates = False

    def bind(self, backend: AttentionBackend, group: int) -> None:
        """Attach the backend and the cache group."""
        self._backend = backend
        self.group = group
        self._rotates = self.cos_sin is not None and not backend.capabilities.fused_rope

    def load_sinks(self, tensor: CheckpointTensor) -> None:
        """Take the learned sink logits, ``[num_heads]``."""
        self.sinks = _dense(
            tensor, (self.spec.num_heads,), torch.float32, self._device, tensor.name
        )

    def awaited(self) -> Iterator[AwaitedTensor]:
        """The sinks, if there are any and they haven't come."""
        if self.spec.has_sinks and self.sinks is None:
            yield AwaitedTensor(
                name=f"attention.{self.layer_index}.sinks",
                shape=(self.spec.num_heads,),
                role="sinks",
                device=self._device,
                load=self.load_sinks,
            )

    def finalize(self) -> None:
        """Check that the sinks have come if there are any."""
        if self.spec.has_sinks and self.sinks is None:
            raise ModelLoadError(
                f"the checkpoint has no sinks for attention layer {self.layer_index}"
            )

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        positions: Tensor,
        step: ForwardStep,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Write the keys and values of all tokens, and attend.

        Args:
            q_TNH: of all tokens, as k, v and ``positions``.
            k_TKH: likewise.
            v_TKH: likewise.
            positions: ``[num_tokens]`` int64.
            step: of the forward pass.
            rows: ``step.wanted_rows`` in a layer whose output isn't needed of other tokens.

        Returns:
            ``[num_tokens, num_heads, head_dim_v]``, or just ``rows`` of that.
        """
        assert self._backend is not None
        if self._rotates:
            assert self.cos_sin is not None
            q_TNH, k_TKH = self._kernels.rope(q_TNH, k_TKH, positions, *self.cos_sin)
        cache = step.caches[self.layer_index]
        if rows is not None and step.wanted_metadata is not None:
            metadata = step.wanted_metadata(self.group)
            q_TNH = self._take_rows(q_TNH, rows)
            return self._backend.forward(self, q_TNH, k_TKH, v_TKH, cache, metadata)
        metadata = step.metadata[self.group]
        out_TNV = self._backend.forward(self, q_TNH, k_TKH, v_TKH, cache, metadata)
        return out_TNV if rows is None else self._take_rows(out_TNV, rows)

    def _take_rows(self, x_TNH: Tensor, rows: Tensor) -> Tensor:
        some = self._kernels.take_rows(x_TNH.flatten(1), rows)
        return some.view(rows.shape[0], *x_TNH.shape[1:])


class LayerFactory:
    """Makes a model's layers, and knows afterwards which attention layers it has.

    Attributes:
        attention_layers: in order of creation, which is the order of ``layer_index``.
    """

    def __init__(
        self,
        *,
        kernels: Kernels,
        quantization: Quantization,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.attention_layers: list[Attention] = []
        self.kernels = kernels
        self._layers: list[Linear | RMSNorm | Embedding | Attention] = []
        self._quantization = quantization
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._device = device

    def linear(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int] | int,
        *,
        has_bias: bool = False,
        is_head: bool = False,
    ) -> Linear:
        """A linear layer.

        Args:
            name: dotted module path.
            in_features: K.
            parts: rows of each merged projection in order, or just N for a single one, whose
                part is named ``weight``.
            has_bias: whether every part has a bias.
            is_head: whether its outputs are logits.
        """
        rows = {"weight": parts} if isinstance(parts, int) else parts
        spec = LinearSpec(
            name=name,
            in_features=in_features,
            parts=tuple(rows.items()),
            has_bias=has_bias,
            dtype=self._dtype,
            device=self._device,
            is_head=is_head,
        )
        layer = Linear(spec, self._quantization, self.kernels)
        self._layers.append(layer)
        return layer

    def rms_norm(self, name: str, size: int, *, eps: float) -> RMSNorm:
        """A norm over the last dimension."""
        layer = RMSNorm(
            name, size, eps=eps, dtype=self._dtype, device=self._device, kernels=self.kernels
        )
        self._layers.append(layer)
        return layer

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """A token embedding."""
        spec = LinearSpec(
            name=name,
            in_features=hidden_size,
            parts=(("weight", vocab_size),),
            has_bias=False,
            dtype=self._dtype,
            device=self._device,
            is_embedding=True,
        )
        layer = Embedding(spec, self._quantization, self.kernels)
        self._layers.append(layer)
        return layer

    def attention(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        cos_sin: tuple[Tensor, Tensor] | None = None,
    ) -> Attention:
        """An attention layer; ``scale`` is ``head_dim ** -0.5`` by default, ``cos_sin`` comes from
        ``rotary_tables``.
        """
        spec = AttentionSpec(
            num_heads=num_heads,
            kv=KVCacheSpec(
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                head_dim_v=head_dim_v or head_dim,
                dtype=_dtype_name(self._kv_dtype),
                sliding_window=sliding_window,
            ),
            scale=head_dim**-0.5 if scale is None else scale,
            dtype=_dtype_name(self._dtype),
            softcap=softcap,
            has_sinks=has_sinks,
        )
        layer = Attention(
            len(self.attention_layers),
            spec,
            kernels=self.kernels,
            cos_sin=cos_sin,
            device=self._device,
        )
        self.attention_layers.append(layer)
        self._layers.append(layer)
        return layer

    def awaited(self) -> Iterator[AwaitedTensor]:
        """What the layers still need, each tensor once; it may be loaded before the next is asked
        for.
        """
        names = set()
        for layer in self._layers:
            for tensor in layer.awaited():
                if tensor.name not in names:  # a tied head waits for what its embedding waits for
                    names.add(tensor.name)
                    yield tensor

    def finalize(self) -> None:
        """Finish every layer after loading.

        Raises:
            ModelLoadError: naming the first layer that the checkpoint left without weights.
        """
        for layer in self._layers:
            layer.finalize()
        self._quantization.finish()


def rotary_tables(
    config: Mapping[str, Any], *, rotary_dim: int, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, ``[max_positions, rotary_dim // 2]`` float32 each
    (arXiv:2104.09864).

    Where transformers changes frequencies as a sequence grows, the tables are those of
    ``max_positions`` from the first position on: ``longrope`` takes its long factors if there are
    more positions than the model was first trained on, ``dynamic`` scales for the longest sequence.

    Args:
        config: the checkpoint's; ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``,
            as transformers spells them.
        rotary_dim: how much of a head is rotated; ``partial_rotary_factor`` is not applied again.
        max_positions: number of rows.
        device: where the tables live.

    Raises:
        ModelLoadError: for a scaling type that is not known, or parameters that it lacks.
    """
    frequencies, factor = _inverse_frequencies(config, rotary_dim, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _inverse_frequencies(
    config: Mapping[str, Any], rotary_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelLoadError(
            f"rope parameters by layer type are not supported: {sorted(rope)}; pass a config "
            "with those of one type"
        )
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    return _scaled_frequencies(config, rope | {"rope_type": kind}, rotary_dim, max_positions)


def _scaled_frequencies(
    config: Mapping[str, Any], rope: dict[str, Any], rotary_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope["rope_type"]
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelLoadError(
            f"rope type {kind!r} is not supported; known: {['default', *ROPE_INIT_FUNCTIONS]}"
        )
    rope.pop("partial_rotary_factor", None)
    longest = config.get("max_position_embeddings") or max_positions
    original = "original_max_position_embeddings"
    if kind in ("yarn", "longrope", "llama3") and rope.get(original) is None:
        rope[original] = config.get(original) or longest
    fields: dict[str, Any] = {
        "head_dim": rotary_dim,
        "hidden_size": rotary_dim,
        "num_attention_heads": 1,
        "max_position_embeddings": longest,
        "rope_parameters": rope,
    }
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            PreTrainedConfig(**fields), torch.device("cpu"), seq_len=max_positions
        )
    except (KeyError, TypeError) as error:
        raise ModelLoadError(
            f"rope parameters {rope!r} don't suit rope type {kind!r}: {error!r}"
        ) from error
    return frequencies.to(torch.float32), float(factor)


def _dense(
    tensor: CheckpointTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ModelLoadError(
            f"tensor {tensor.name!r} has shape {tuple(tensor.shape)}, but {name!r} needs {shape}"
        )
    return tensor.to_dense(dtype).to(device)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
