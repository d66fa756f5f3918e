"""Assembly: from a config to a running engine core, every part chosen, checked and built in one
place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    EvictionContext,
    Executor,
    ExecutorContext,
    GuidedDecodingContext,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    KVCacheSpec,
    LogitsProcessorContext,
    Model,
    ModelCapabilities,
    ModelContext,
    ProposerContext,
    QuantizationCapabilities,
    QuantizationContext,
    SamplerContext,
    SchedulerContext,
)
from hotshoe.api.layers import Attention, LayerFactory
from hotshoe.config import EngineConfig
from hotshoe.engine.core import EngineCore
from hotshoe.engine.planner import PlannerLimits
from hotshoe.engine.resolution import Choice, Resolution, Resolver, reasons_against
from hotshoe.errors import ConfigError, ModelLoadError, PluginContractError
from hotshoe.kv_cache.manager import KVCacheManager
from hotshoe.kv_cache.sizing import available_memory_bytes, num_blocks_for_budget
from hotshoe.plugins import LoadedPlugin, PluginRegistry
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer
from hotshoe.weights.checkpoint import Checkpoint, open_checkpoint
from hotshoe.weights.loader import load_weights
from hotshoe.worker.runner import ModelRunner, WorkerLimits, WorkerParts

if TYPE_CHECKING:
    from hotshoe.api.quantization import Quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What follows from config and checkpoint together."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """A model without weights: its layers say what attention and cache must provide."""

    model: Model
    layers: LayerFactory
    attention: AttentionBackend
    attention_layers: Sequence[Attention]
    groups: tuple[KVCacheSpec, ...]


@dataclass(slots=True, kw_only=True)
class Engine:
    """An assembled engine: the core and what its front ends need to know."""

    core: EngineCore
    config: EngineConfig
    facts: Facts
    tokenizer: Tokenizer
    registry: PluginRegistry
    resolution: Resolution
    resolver: Resolver
    generation_config: Mapping[str, Any]

    def scheduler_context(self) -> SchedulerContext:
        """What a scheduler is built on, also one that replaces another."""
        return _scheduler_context(self.config, self.facts, self.core.kv_cache.num_blocks)

    def sampler_context(self) -> SamplerContext:
        """What a sampler is built on."""
        return SamplerContext(device=self.facts.device, vocab_size=self.core.vocab_size)

    def put(self, choice: Choice, component: Any) -> None:
        """Let a scheduler or sampler take the place of the one before; no request may be alive."""
        if choice.section == "scheduler":
            self.core.scheduler = component
        else:
            self.core.executor.call("use_sampler", component).result()
        self.resolution.choices[choice.section] = choice


def resolve(config: EngineConfig, *, instances: Mapping[str, object] | None = None) -> Resolution:
    """Choose every plugin of a config as ``build_engine`` would, without reading weights.

    Raises:
        HotshoeError: as ``build_engine`` would.
    """
    registry = _registry(config)
    resolver = Resolver(config, registry, instances or {})
    with open_checkpoint(config.model.path, revision=config.model.revision) as checkpoint:
        _build_skeleton(resolver, checkpoint, _facts(config, checkpoint))
    _choose_rest(resolver)
    return resolver.resolution


def build_engine(config: EngineConfig, *, instances: Mapping[str, object] | None = None) -> Engine:
    """Assemble an engine.

    Args:
        config: resolved and validated.
        instances: ready-made components by config section, instead of what the config names.

    Raises:
        ConfigError: if values contradict the model or each other.
        PluginError: if a plugin can't be used.
        ModelLoadError: if the checkpoint can't be read.
        KVCacheError: if the budget can't hold one request.
    """
    registry = _registry(config)
    resolver = Resolver(config, registry, instances or {})
    with open_checkpoint(config.model.path, revision=config.model.revision) as checkpoint:
        facts = _facts(config, checkpoint)
        tokenizer = load_tokenizer(
            checkpoint, tokenizer=config.model.tokenizer, chat_template=config.model.chat_template
        )
        skeleton = _build_skeleton(resolver, checkpoint, facts)
        _choose_rest(resolver)

        def create_worker(rank: int) -> ModelRunner:
            # an executor that simulates its workers never comes here, so no weights are read
            load_weights(skeleton.model, skeleton.layers, checkpoint)
            return _worker(resolver, skeleton, facts, tokenizer)

        context = ExecutorContext(create_worker=create_worker)
        executor: Executor = resolver.build(resolver.resolution.choices["executor"], context)
        try:
            core = _core(resolver, skeleton, facts, tokenizer, executor)
        except BaseException:
            executor.close()
            raise
        generation_config = dict(checkpoint.generation_config)
    _attach_observers(core, registry)
    registry.notify_started(resolver.resolution.components())
    return Engine(
        core=core,
        config=config,
        facts=facts,
        tokenizer=tokenizer,
        registry=registry,
        resolution=resolver.resolution,
        resolver=resolver,
        generation_config=generation_config if config.model.use_generation_config else {},
    )


def _core(
    resolver: Resolver,
    skeleton: Skeleton,
    facts: Facts,
    tokenizer: Tokenizer,
    executor: Executor,
) -> EngineCore:
    config = resolver.config
    choices = resolver.resolution.choices
    kv_cache = _kv_cache(resolver, skeleton, facts)
    executor.call("allocate_kv_cache", kv_cache.num_blocks).result()
    scheduler_context = _scheduler_context(config, facts, kv_cache.num_blocks)
    return EngineCore(
        scheduler=resolver.build(choices["scheduler"], scheduler_context),
        executor=executor,
        kv_cache=kv_cache,
        limits=_planner_limits(resolver, facts),
        vocab_size=skeleton.model.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        logits_processors=[choice.info.name for choice, _ in resolver.resolution.processors],
        seed=config.seed,
    )


def _worker(
    resolver: Resolver, skeleton: Skeleton, facts: Facts, tokenizer: Tokenizer
) -> ModelRunner:
    limits = WorkerLimits(
        max_num_seqs=resolver.config.scheduler.max_num_seqs,
        max_model_len=facts.max_model_len,
        block_size=resolver.config.cache.block_size,
    )
    return ModelRunner(_worker_parts(resolver, skeleton, facts, tokenizer), limits)


def _registry(config: EngineConfig) -> PluginRegistry:
    plugins = config.plugins
    return PluginRegistry(plugins.allow, plugins.deny, safe_mode=plugins.safe_mode)


def _facts(config: EngineConfig, checkpoint: Checkpoint) -> Facts:
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
    )


def _trained_length(checkpoint: Checkpoint) -> int | None:
    length = checkpoint.config.get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelLoadError(
            f"model {checkpoint.name!r}: max_position_embeddings in config.json is {length!r}; "
            "allowed: a whole number of at least 1, or null"
        )
    return length


# -- the model --------------------------------------------------------------------------------


def _build_skeleton(resolver: Resolver, checkpoint: Checkpoint, facts: Facts) -> Skeleton:
    quantization_choice = resolver.choose("quantization", _quantization_reasons)
    assert quantization_choice is not None
    formats = _weight_formats(quantization_choice)
    kernels_choice = resolver.choose(
        "kernels",
        lambda candidate: _kernels_reasons(candidate.component.capabilities, formats, facts),
    )
    architectures = _architectures(checkpoint)
    model_choice = resolver.choose(
        "model", lambda candidate: _model_reasons(candidate, architectures)
    )
    assert kernels_choice is not None
    assert model_choice is not None
    kernels: Kernels = resolver.build(
        kernels_choice, KernelsContext(device=facts.device, dtype=facts.dtype)
    )
    if kernels_choice.instance is not None:
        reasons = _kernels_reasons(kernels.capabilities, formats, facts)
        if reasons:
            raise ConfigError(
                f"kernels {kernels_choice.info.name} can't be used: {'; '.join(reasons)}"
            )
    quantization: Quantization = resolver.build(
        quantization_choice, QuantizationContext(device=facts.device, dtype=facts.dtype)
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
    groups = _bind(layers.attention_layers, attention)
    return Skeleton(
        model=model,
        layers=layers,
        attention=attention,
        attention_layers=layers.attention_layers,
        groups=groups,
    )


def _architectures(checkpoint: Checkpoint) -> list[str]:
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


def _model_reasons(candidate: LoadedPlugin, architectures: list[str]) -> list[str]:
    capabilities = candidate.component.capabilities
    if not isinstance(capabilities, ModelCapabilities):
        return ["its component has no ModelCapabilities"]
    return reasons_against("architecture", architectures[:1], capabilities.architectures)


def _quantization_reasons(candidate: LoadedPlugin) -> list[str]:
    if not isinstance(candidate.component.capabilities, QuantizationCapabilities):
        return ["its component has no QuantizationCapabilities"]
    return []


def _weight_formats(quantization: Choice) -> Sequence[str]:
    """Formats that the weights may come in. An object that was handed in doesn't tell, so its
    weights are only checked as they are loaded.
    """
    component = quantization.component
    if component is None or not isinstance(component.capabilities, QuantizationCapabilities):
        return ()
    return component.capabilities.weight_formats


def _kernels_reasons(offered: object, formats: Sequence[str], facts: Facts) -> list[str]:
    if not isinstance(offered, KernelsCapabilities):
        return ["it has no KernelsCapabilities"]
    return [
        *reasons_against("device", [facts.device.type], offered.devices),
        *reasons_against("dtype", [_name(facts.dtype)], offered.dtypes),
        *reasons_against("weight format", formats, offered.weight_formats),
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
        reasons = reasons_against("device", [facts.device.type], offered.devices)
        if reasons:
            return reasons
        backend: AttentionBackend = resolver.registry.build(
            candidate, config.attention.options, context, section="attention"
        )
        built[candidate.info.key] = backend
        return _spec_reasons(backend, layers)

    choice = resolver.choose("attention", check)
    assert choice is not None
    if choice.instance is None:
        return built[choice.info.key]
    backend: AttentionBackend = resolver.build(choice, context)
    reasons = _spec_reasons(backend, layers)
    if reasons:
        raise ConfigError(f"attention {choice.info.name} can't be used: {'; '.join(reasons)}")
    return backend


def _spec_reasons(backend: AttentionBackend, layers: Sequence[Attention]) -> list[str]:
    reasons: dict[str, None] = {}
    for layer in layers:
        reasons |= dict.fromkeys(backend.supports(layer.spec))
    return list(reasons)


def _bind(layers: Sequence[Attention], backend: AttentionBackend) -> tuple[KVCacheSpec, ...]:
    groups: dict[KVCacheSpec, int] = {}
    for layer in layers:
        group = groups.setdefault(layer.spec.kv, len(groups))
        layer.bind(backend, group)
    if len(groups) > 1:
        listed = "; ".join(str(spec) for spec in groups)
        raise ModelLoadError(
            f"the model needs {len(groups)} KV cache groups ({listed}); only models whose layers "
            "all cache alike can be run yet"
        )
    return tuple(groups)


# -- everything else ----------------------------------------------------------------------------


def _choose_rest(resolver: Resolver) -> None:
    for section in ("sampler", "spec_decode", "guided_decoding", "executor", "scheduler"):
        resolver.choose(section)
    resolver.choose("cache.eviction")
    resolver.choose_processors()


def _worker_parts(
    resolver: Resolver, skeleton: Skeleton, facts: Facts, tokenizer: Tokenizer
) -> WorkerParts:
    choices = resolver.resolution.choices
    vocab_size = skeleton.model.vocab_size
    proposer = None
    if "spec_decode" in choices:
        context = ProposerContext(
            device=facts.device,
            vocab_size=vocab_size,
            max_model_len=facts.max_model_len,
            max_num_seqs=resolver.config.scheduler.max_num_seqs,
        )
        proposer = resolver.build(choices["spec_decode"], context)
        _check_requirements(choices["spec_decode"])
    guided_decoding = None
    if "guided_decoding" in choices:
        guided_decoding = resolver.build(
            choices["guided_decoding"],
            GuidedDecodingContext(
                vocab_size=vocab_size,
                token_bytes=tokenizer.token_bytes(),
                eos_token_ids=tokenizer.eos_token_ids,
                tokenizer_json=tokenizer.tokenizer_json,
            ),
        )
    processor_context = LogitsProcessorContext(device=facts.device, vocab_size=vocab_size)
    processors = {
        choice.info.name: (resolver.build(choice, processor_context), is_always)
        for choice, is_always in resolver.resolution.processors
    }
    return WorkerParts(
        model=skeleton.model,
        attention=skeleton.attention,
        attention_layers=skeleton.attention_layers,
        groups=skeleton.groups,
        sampler=resolver.build(
            choices["sampler"], SamplerContext(device=facts.device, vocab_size=vocab_size)
        ),
        logits_processors=processors,
        proposer=proposer,
        proposer_requirements=_requirements(choices),
        guided_decoding=guided_decoding,
        device=facts.device,
    )


def _requirements(choices: Mapping[str, Choice]) -> Any:
    from hotshoe.api import Requirements

    choice = choices.get("spec_decode")
    return choice.requirements if choice else Requirements()


def _check_requirements(choice: Choice) -> None:
    if choice.requirements.kv_specs:
        raise PluginContractError(
            f"{choice.info.label} requires KV caches of its own, which the core can't provide yet"
        )


def _kv_cache(resolver: Resolver, skeleton: Skeleton, facts: Facts) -> KVCacheManager:
    cache = resolver.config.cache
    layouts = [skeleton.attention.layout(layer.spec) for layer in skeleton.attention_layers]
    bytes_per_block = sum(layout.bytes_per_block for layout in layouts)
    free_bytes = _free_bytes(facts.device)
    num_blocks = cache.num_blocks
    if num_blocks is None and cache.memory_gb is None:
        # more than every row at full length is of no use, and a tiny model would get millions
        most = resolver.config.scheduler.max_num_seqs * -(-facts.max_model_len // cache.block_size)
        if not bytes_per_block or most * bytes_per_block < free_bytes * cache.memory_fraction:
            num_blocks = most
    budget = num_blocks_for_budget(
        bytes_per_block=max(bytes_per_block, 1),
        memory_bytes=None if cache.memory_gb is None else int(cache.memory_gb * 1024**3),
        fraction=cache.memory_fraction,
        free_bytes=free_bytes,
        num_blocks=num_blocks,
        max_model_len=facts.max_model_len,
        block_size=cache.block_size,
    )
    logger.info(
        "kv cache: %d blocks of %d tokens, %.2f GiB: %d tokens, %.1f requests of full length %d",
        budget.num_blocks,
        cache.block_size,
        budget.num_bytes / 1024**3,
        budget.num_tokens,
        budget.num_full_length_requests,
        facts.max_model_len,
    )
    choices = resolver.resolution.choices
    requirements = _requirements(choices)
    eviction = resolver.build(
        choices["cache.eviction"],
        EvictionContext(num_blocks=budget.num_blocks, block_size=cache.block_size),
    )
    return KVCacheManager(
        num_blocks=budget.num_blocks,
        block_size=cache.block_size,
        num_groups=max(len(skeleton.groups), 1),
        eviction=eviction,
        enable_prefix_caching=cache.enable_prefix_caching,
        reads_next_token=requirements.reads_next_token,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()


def _planner_limits(resolver: Resolver, facts: Facts) -> PlannerLimits:
    scheduler = resolver.config.scheduler
    return PlannerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        max_preemptions_without_progress=scheduler.max_preemptions_without_progress,
        num_lookahead_slots=_requirements(resolver.resolution.choices).num_lookahead_slots,
    )


def _scheduler_context(config: EngineConfig, facts: Facts, num_blocks: int) -> SchedulerContext:
    return SchedulerContext(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
    )


def _attach_observers(core: EngineCore, registry: PluginRegistry) -> None:
    if registry.is_observed("hotshoe_step_committed"):
        core.step_observers.append(registry.notify_step)
    if registry.is_observed("hotshoe_request_finished"):
        core.finish_observers.append(registry.notify_finished)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
