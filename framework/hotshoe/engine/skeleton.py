"""A model without weights, with the kernels, quantization and attention that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    DraftCheckpoint,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    KVCacheSpec,
    Model,
    ModelCapabilities,
    ModelContext,
    QuantizationCapabilities,
    QuantizationContext,
)
from hotshoe.api.layers import Attention, LayerFactory
from hotshoe.config import EngineConfig
from hotshoe.engine.resolution import Choice, Resolver, reasons_against
from hotshoe.errors import ConfigError, ModelLoadError
from hotshoe.plugins import LoadedPlugin
from hotshoe.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from hotshoe.api.quantization import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What follows from config and checkpoint together."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    is_deterministic: bool


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """A model without weights: its layers say what attention and cache must provide."""

    model: Model
    layers: LayerFactory
    attention: AttentionBackend
    attention_layers: Sequence[Attention]
    groups: tuple[KVCacheSpec, ...]


def facts_of(config: EngineConfig, checkpoint: Checkpoint) -> Facts:
    """Settle what ``auto`` and unset values mean for a checkpoint on this machine.

    Raises:
        ConfigError: if the config asks for more than the machine or the model has.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' but torch finds no usable GPU; set device to 'cpu'")
    device = "cuda" if config.device != "cpu" and has_cuda else "cpu"
    dtype_name = checkpoint.dtype if config.model.dtype == "auto" else config.model.dtype
    kv_name = dtype_name if config.cache.dtype == "auto" else config.cache.dtype
    trained = _trained_length(checkpoint)
    wanted = config.model.max_model_len
    if wanted is not None and trained is not None and wanted > trained:
        raise ConfigError(
            f"model.max_model_len is {wanted} but the model was trained for {trained} positions; "
            f"lower it to {trained} or less"
        )
    if wanted is None and trained is None:
        raise ConfigError("the model doesn't say its maximal length; set model.max_model_len")
    return Facts(
        device=torch.device(device),
        dtype=getattr(torch, dtype_name),
        kv_dtype=getattr(torch, kv_name),
        max_model_len=wanted or trained or 0,
        is_deterministic=config.deterministic,
    )


def _trained_length(checkpoint: Checkpoint) -> int | None:
    length = checkpoint.config.get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelLoadError(
            f"model {checkpoint.name!r}: max_position_embeddings in config.json is {length!r}; "
            "allowed: a whole number of at least 1, or null"
        )
    return length


def build_skeleton(resolver: Resolver, checkpoint: Checkpoint, facts: Facts) -> Skeleton:
    """Choose and build what a model consists of; no weight is read.

    Raises:
        HotshoeError: if parts are missing or don't fit each other.
    """
    quantization_choice = resolver.choose("quantization", _quantization_reasons)
    assert quantization_choice is not None
    quantization: Quantization = resolver.build(
        quantization_choice,
        QuantizationContext(
            device=facts.device, dtype=facts.dtype, checkpoint_format=checkpoint.format
        ),
    )
    kernels_choice = resolver.choose(
        "kernels",
        lambda candidate: _kernels_reasons(
            candidate.component.capabilities, quantization_choice, facts
        ),
    )
    architectures = architectures_of(checkpoint)
    model_choice = resolver.choose(
        "model", lambda candidate: model_reasons(candidate, architectures)
    )
    assert kernels_choice is not None
    assert model_choice is not None
    kernels: Kernels = resolver.build(
        kernels_choice, KernelsContext(device=facts.device, dtype=facts.dtype)
    )
    if kernels_choice.instance is not None:
        reasons = _kernels_reasons(kernels.capabilities, quantization_choice, facts)
        if reasons:
            raise ConfigError(
                f"kernels {kernels_choice.info.name} can't be used: {'; '.join(reasons)}"
            )
    layers = LayerFactory(
        kernels=kernels,
        quantization=quantization,
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        device=facts.device,
    )
    context = ModelContext(
        config=checkpoint.config,
        layers=layers,
        dtype=facts.dtype,
        device=facts.device,
        max_model_len=facts.max_model_len,
    )
    model: Model = resolver.build(model_choice, context)
    attention = _choose_attention(resolver, layers.attention_layers, facts)
    groups = bind_layers(layers.attention_layers, attention)
    if len(groups) > 1:
        listed = "; ".join(str(spec) for spec in groups)
        raise ModelLoadError(
            f"the model needs {len(groups)} KV cache groups ({listed}); only models whose layers "
            "all cache alike can be run yet"
        )
    return Skeleton(
        model=model,
        layers=layers,
        attention=attention,
        attention_layers=layers.attention_layers,
        groups=groups,
    )


def architectures_of(checkpoint: DraftCheckpoint) -> list[str]:
    """What a checkpoint's config names.

    Raises:
        ModelLoadError: if it names none.
    """
    architectures = checkpoint.config.get("architectures")
    if not architectures:
        raise ModelLoadError(
            f"model {checkpoint.name!r}: config.json names no architecture; add 'architectures'"
        )
    if not isinstance(architectures, list):
        raise ModelLoadError(
            f"model {checkpoint.name!r}: architectures in config.json is {architectures!r}; "
            "allowed: a list of names"
        )
    return list(architectures)


def model_reasons(candidate: LoadedPlugin, architectures: list[str]) -> list[str]:
    """Reasons against a model plugin."""
    capabilities = candidate.component.capabilities
    if not isinstance(capabilities, ModelCapabilities):
        return ["its component has no ModelCapabilities"]
    return reasons_against("architecture", architectures[:1], capabilities.architectures)


def _quantization_reasons(candidate: LoadedPlugin) -> list[str]:
    if not isinstance(candidate.component.capabilities, QuantizationCapabilities):
        return ["its component has no QuantizationCapabilities"]
    return []


def _produced_formats(quantization: Choice) -> QuantizationCapabilities:
    """Formats that the weights may come in. An object that was handed in doesn't tell, so its
    weights are only checked as they are loaded.
    """
    component = quantization.component
    if component is None or not isinstance(component.capabilities, QuantizationCapabilities):
        return QuantizationCapabilities(weight_formats=(), embedding_formats=())
    return component.capabilities


def _kernels_reasons(offered: object, quantization: Choice, facts: Facts) -> list[str]:
    if not isinstance(offered, KernelsCapabilities):
        return ["it has no KernelsCapabilities"]
    produced, linear = _produced_formats(quantization), offered.weight_formats
    # a format that isn't there at all is one reason, not two
    embedding = [one for one in produced.embedding_formats if one in linear]
    lacking = [
        *reasons_against("weight format", produced.weight_formats, linear),
        *reasons_against("embedding format", embedding, offered.embedding_formats),
    ]
    return [
        *reasons_against("device", [facts.device.type], offered.devices),
        *reasons_against("dtype", [_name(facts.dtype)], offered.dtypes),
        *_variance_reasons(offered.is_batch_invariant, facts),
        *(f"{one}, needed by quantization {quantization.info.name!r}" for one in lacking),
    ]


def _choose_attention(
    resolver: Resolver, layers: Sequence[Attention], facts: Facts
) -> AttentionBackend:
    config = resolver.config
    context = AttentionContext(
        device=facts.device,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
    )
    built: dict[str, AttentionBackend] = {}

    def check(candidate: LoadedPlugin) -> list[str]:
        offered = candidate.component.capabilities
        if not isinstance(offered, AttentionCapabilities):
            return ["its component has no AttentionCapabilities"]
        return [
            *reasons_against("device", [facts.device.type], offered.devices),
            *_variance_reasons(offered.is_batch_invariant, facts),
        ]

    def trial(candidate: LoadedPlugin) -> list[str]:
        backend: AttentionBackend = resolver.registry.build(
            candidate, config.attention.options, context, section="attention"
        )
        built[candidate.info.key] = backend
        return spec_reasons(backend, layers)

    choice = resolver.choose("attention", check, trial=trial)
    assert choice is not None
    if choice.instance is None:
        return built[choice.info.key]
    backend: AttentionBackend = resolver.build(choice, context)
    reasons = [
        *_variance_reasons(backend.capabilities.is_batch_invariant, facts),
        *spec_reasons(backend, layers),
    ]
    if reasons:
        raise ConfigError(f"attention {choice.info.name} can't be used: {'; '.join(reasons)}")
    return backend


def _variance_reasons(is_batch_invariant: bool, facts: Facts) -> list[str]:
    if is_batch_invariant or not facts.is_deterministic:
        return []
    return ["its results vary with the batch, and deterministic is true"]


def spec_reasons(backend: AttentionBackend, layers: Sequence[Attention]) -> list[str]:
    """Reasons of a backend against some layers, each once."""
    reasons: dict[str, None] = {}
    for layer in layers:
        reasons |= dict.fromkeys(backend.supports(layer.spec))
    return list(reasons)


def bind_layers(layers: Sequence[Attention], backend: AttentionBackend) -> tuple[KVCacheSpec, ...]:
    """Attach a backend to layers, and number their groups in order of appearance."""
    groups: dict[KVCacheSpec, int] = {}
    for layer in layers:
        group = groups.setdefault(layer.spec.kv, len(groups))
        layer.bind(backend, group)
    return tuple(groups)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
