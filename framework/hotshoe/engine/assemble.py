"""Assembly: from a config to a running engine core, every part chosen, checked and built in one
place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotshoe.api import (
    EvictionContext,
    Executor,
    ExecutorContext,
    LogitsProcessorContext,
    Requirements,
    SamplerCapabilities,
    SamplerContext,
    SchedulerContext,
)
from hotshoe.config import EngineConfig
from hotshoe.engine.core import EngineCore
from hotshoe.engine.drafting import Drafter, acceptance_rule, build_drafter
from hotshoe.engine.guided import choose_guided_decoding, guided_decoding_parts
from hotshoe.engine.kv_budget import expected_use, kv_budget
from hotshoe.engine.planner import PlannerLimits
from hotshoe.engine.resolution import Check, Choice, Resolution, Resolver, reasons_against
from hotshoe.engine.skeleton import Facts, Skeleton, build_skeleton, facts_of
from hotshoe.kv_cache.manager import KVCacheManager
from hotshoe.kv_cache.sizing import MemoryUse
from hotshoe.plugins import LoadedPlugin, PluginRegistry
from hotshoe.text.tokenizer import MissingTokenizer, Tokenizer, has_tokenizer, load_tokenizer
from hotshoe.weights.checkpoint import Checkpoint, open_model
from hotshoe.weights.loader import load_weights, release_freed_memory, stored_bytes
from hotshoe.worker.device_memory import CudaMemory, memory_for
from hotshoe.worker.draft_control import AdaptiveDraftControl, DraftControl
from hotshoe.worker.draft_costs import MeasuredCosts
from hotshoe.worker.runner import ModelRunner, WorkerLimits, WorkerParts

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


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

    def choose(self, section: str, name: str, options: Mapping[str, Any]) -> Choice:
        """A scheduler or sampler that could take the place of the one before.

        Raises:
            PluginError: if it can't be loaded.
            ConfigError: with the reasons against it.
        """
        check = _sampler_check(self.facts) if section == "sampler" else None
        return self.resolver.selected(section, name, options, check)

    def put(self, choice: Choice, component: Any) -> None:
        """Let a scheduler or sampler take the place of the one before; no request may be alive."""
        if choice.section == "scheduler":
            self.core.scheduler = component
        else:
            self.core.executor.call("use_sampler", component).result()
        self.resolution.choices[choice.section] = choice

    def settle_plugins(self) -> None:
        """Have the hooks called of those plugins that fill a place now, and of no others."""
        processors = [choice for choice, _ in self.resolution.processors]
        others = self.resolution.other_backends
        chosen = [*self.resolution.choices.values(), *processors, *others]
        self.registry.retain({choice.info.key for choice in chosen if choice.loaded})
        _attach_observers(self.core, self.registry)


def resolve(config: EngineConfig, *, instances: Mapping[str, object] | None = None) -> Resolution:
    """Choose every plugin of a config as ``build_engine`` would, without reading weights; also see
    to it that the tokenizer can be read and the KV cache holds a request.

    Raises:
        HotshoeError: as ``build_engine`` would.
    """
    registry = _registry(config)
    resolver = Resolver(config, registry, instances or {})
    with open_model(config.model) as checkpoint:
        facts = facts_of(config, checkpoint)
        resolver.resolution.chat_template = _tokenizer(config, checkpoint).chat_template
        skeleton = build_skeleton(resolver, checkpoint, facts)
        drafter = build_drafter(resolver, checkpoint, skeleton, facts)
        weight_bytes = stored_bytes(skeleton.layers, checkpoint)
    _choose_rest(resolver, facts)
    kv_budget(config, skeleton, drafter, facts, expected_use(facts.device, weight_bytes))
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
    with open_model(config.model) as checkpoint:
        facts = facts_of(config, checkpoint)
        tokenizer = _tokenizer(config, checkpoint)
        skeleton = build_skeleton(resolver, checkpoint, facts)
        drafter = build_drafter(resolver, checkpoint, skeleton, facts)
        _choose_rest(resolver, facts)
        weight_gib = stored_bytes(skeleton.layers, checkpoint) / 1024**3

        def create_worker(rank: int) -> ModelRunner:
            # an executor that simulates its workers never comes here, so no weights are read
            with memory_for(
                f"the weights ({weight_gib:.2f} GiB as they are stored)",
                "end other programs on it, or use a smaller or quantized model",
            ):
                load_weights(skeleton.model, skeleton.layers, checkpoint)
                if drafter is not None:
                    drafter.load_weights()
            release_freed_memory()
            return _worker(resolver, skeleton, drafter, facts, tokenizer)

        context = ExecutorContext(create_worker=create_worker)
        executor: Executor = resolver.build(resolver.resolution.choices["executor"], context)
        try:
            core = _core(resolver, skeleton, drafter, facts, tokenizer, executor)
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
    drafter: Drafter | None,
    facts: Facts,
    tokenizer: Tokenizer,
    executor: Executor,
) -> EngineCore:
    config = resolver.config
    choices = resolver.resolution.choices
    use: MemoryUse | None = None
    if facts.device.type == "cuda":
        use = executor.call("profile_memory").result()
    kv_cache = _kv_cache(resolver, skeleton, drafter, facts, use)
    executor.call("allocate_kv_cache", kv_cache.num_blocks).result()
    scheduler_context = _scheduler_context(config, facts, kv_cache.num_blocks)
    return EngineCore(
        scheduler=resolver.build(choices["scheduler"], scheduler_context),
        executor=executor,
        kv_cache=kv_cache,
        limits=_planner_limits(resolver, drafter, facts),
        vocab_size=skeleton.model.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        logits_processors=[choice.info.name for choice, _ in resolver.resolution.processors],
        seed=config.seed,
    )


def _worker(
    resolver: Resolver,
    skeleton: Skeleton,
    drafter: Drafter | None,
    facts: Facts,
    tokenizer: Tokenizer,
) -> ModelRunner:
    limits = WorkerLimits(
        max_num_seqs=resolver.config.scheduler.max_num_seqs,
        max_num_batched_tokens=resolver.config.scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        block_size=resolver.config.cache.block_size,
        record=resolver.config.kernels.record,
        record_batch_sizes=resolver.config.kernels.record_batch_sizes,
    )
    return ModelRunner(_worker_parts(resolver, skeleton, drafter, facts, tokenizer), limits)


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    model = config.model
    if model.weights == "random" and model.tokenizer is None and not has_tokenizer(checkpoint):
        logger.info("model %r has no tokenizer: prompts and outputs are token ids", model.path)
        return MissingTokenizer(checkpoint)
    return load_tokenizer(checkpoint, tokenizer=model.tokenizer, chat_template=model.chat_template)


def _registry(config: EngineConfig) -> PluginRegistry:
    plugins = config.plugins
    return PluginRegistry(plugins.allow, plugins.deny, safe_mode=plugins.safe_mode)


def _choose_rest(resolver: Resolver, facts: Facts) -> None:
    resolver.choose("sampler", _sampler_check(facts))
    choose_guided_decoding(resolver)
    for section in ("executor", "scheduler"):
        resolver.choose(section)
    resolver.choose("cache.eviction")
    resolver.choose_processors()


def _sampler_check(facts: Facts) -> Check:
    def check(candidate: LoadedPlugin) -> list[str]:
        offered = candidate.component.capabilities or SamplerCapabilities()
        if not isinstance(offered, SamplerCapabilities):
            return [f"its capabilities are {offered!r}, which are no SamplerCapabilities"]
        return reasons_against("device", [facts.device.type], offered.devices)

    return check


def _worker_parts(
    resolver: Resolver,
    skeleton: Skeleton,
    drafter: Drafter | None,
    facts: Facts,
    tokenizer: Tokenizer,
) -> WorkerParts:
    choices = resolver.resolution.choices
    vocab_size = skeleton.model.vocab_size
    processor_context = LogitsProcessorContext(device=facts.device, vocab_size=vocab_size)
    processors = {
        choice.info.name: (resolver.build(choice, processor_context), is_always)
        for choice, is_always in resolver.resolution.processors
    }
    return WorkerParts(
        model=skeleton.model,
        kernels=skeleton.layers.kernels,
        attention=skeleton.attention,
        attention_layers=skeleton.attention_layers,
        groups=skeleton.groups,
        sampler=resolver.build(
            choices["sampler"], SamplerContext(device=facts.device, vocab_size=vocab_size)
        ),
        logits_processors=processors,
        proposer=drafter.proposer if drafter else None,
        draft_layers=drafter.attention_layers if drafter else (),
        draft_parts=drafter.parts if drafter else None,
        draft_forwards=drafter.forwards if drafter else None,
        draft_control=_draft_control(resolver.config, drafter),
        acceptance=acceptance_rule(resolver.config.spec_decode),
        guided_decoding=guided_decoding_parts(resolver, tokenizer, vocab_size, facts.device),
        device=facts.device,
        memory=CudaMemory(facts.device) if facts.device.type == "cuda" else None,
    )


def _draft_control(config: EngineConfig, drafter: Drafter | None) -> DraftControl:
    section = config.spec_decode
    if drafter is None or not section.adaptive:
        return DraftControl(section.max_batch_size)
    max_draft_tokens = drafter.proposer.max_draft_tokens
    return AdaptiveDraftControl(
        MeasuredCosts(max_draft_tokens),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_draft_tokens=max_draft_tokens,
        max_batch_size=section.max_batch_size,
        can_compare=section.acceptance != "typical",
    )


def _requirements(drafter: Drafter | None) -> Requirements:
    return drafter.requirements if drafter else Requirements()


def _kv_cache(
    resolver: Resolver,
    skeleton: Skeleton,
    drafter: Drafter | None,
    facts: Facts,
    use: MemoryUse | None,
) -> KVCacheManager:
    cache = resolver.config.cache
    budget = kv_budget(resolver.config, skeleton, drafter, facts, use)
    logger.info(
        "kv cache: %d blocks of %d tokens, %.2f GiB: %d tokens, %.1f requests of full length %d",
        budget.num_blocks,
        cache.block_size,
        budget.num_bytes / 1024**3,
        budget.num_tokens,
        budget.num_full_length_requests,
        facts.max_model_len,
    )
    eviction = resolver.build(
        resolver.resolution.choices["cache.eviction"],
        EvictionContext(num_blocks=budget.num_blocks, block_size=cache.block_size),
    )
    return KVCacheManager(
        num_blocks=budget.num_blocks,
        block_size=cache.block_size,
        num_groups=max(len(skeleton.groups), 1),
        eviction=eviction,
        enable_prefix_caching=cache.enable_prefix_caching,
        reads_next_token=_requirements(drafter).reads_next_token,
    )


def _planner_limits(resolver: Resolver, drafter: Drafter | None, facts: Facts) -> PlannerLimits:
    scheduler = resolver.config.scheduler
    return PlannerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        max_preemptions_without_progress=scheduler.max_preemptions_without_progress,
        num_lookahead_slots=_requirements(drafter).num_lookahead_slots,
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
    """Also again, after plugins were swapped."""
    wanted: list[tuple[str, list[Any], Any]] = [
        ("hotshoe_step_committed", core.step_observers, registry.notify_step),
        ("hotshoe_request_finished", core.finish_observers, registry.notify_finished),
    ]
    for hook, observers, notify in wanted:
        if notify in observers:
            observers.remove(notify)
        if registry.is_observed(hook):
            observers.append(notify)
