"""A proposer, with layers of its own if it has any, built for the model that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hotshoe.api import (
    DraftCheckpoint,
    DraftTarget,
    KVCacheSpec,
    Model,
    ModelContext,
    PluginContractError,
    Proposer,
    ProposerContext,
    QuantizationContext,
    Requirements,
)
from hotshoe.api.layers import Attention, LayerFactory
from hotshoe.engine.resolution import Resolver
from hotshoe.engine.skeleton import (
    Facts,
    Skeleton,
    architectures_of,
    bind_layers,
    model_reasons,
    spec_reasons,
)
from hotshoe.errors import ConfigError, ModelLoadError
from hotshoe.plugins import RefusedPlugin
from hotshoe.text.tokenizer import has_tokenizer, load_tokenizer
from hotshoe.weights.checkpoint import Checkpoint, open_checkpoint
from hotshoe.worker.draft_forwards import DraftLayerParts, WorkerDraftForwards

_SECTION = "spec_decode"
_QUANTIZATION = "spec_decode.quantization"


@dataclass(slots=True, kw_only=True)
class Drafter:
    """A proposer and what its layers need.

    Attributes:
        layers: that made its layers; None = it has none.
        groups: what its attention layers keep, by ``Attention.group``.
    """

    proposer: Proposer
    forwards: WorkerDraftForwards
    parts: DraftLayerParts
    layers: LayerFactory | None = None

    @property
    def requirements(self) -> Requirements:
        """Of the proposer."""
        return self.proposer.requirements

    @property
    def attention_layers(self) -> Sequence[Attention]:
        """In the order of their caches."""
        return self.layers.attention_layers if self.layers else ()

    def load_weights(self) -> None:
        """Read its weights, if it has any; the target's are there already."""
        self.proposer.load_weights()
        if self.layers is not None:
            self.layers.finalize()


def build_drafter(
    resolver: Resolver, checkpoint: Checkpoint, skeleton: Skeleton, facts: Facts
) -> Drafter | None:
    """Choose and build the proposer; no weight is read.

    Raises:
        HotshoeError: if it can't be used with this model.
    """
    choice = resolver.choose(_SECTION)
    if choice is None:
        return None
    builder = _Builder(resolver, checkpoint, skeleton, facts)
    context = ProposerContext(
        device=facts.device,
        vocab_size=skeleton.model.vocab_size,
        max_model_len=facts.max_model_len,
        max_num_seqs=resolver.config.scheduler.max_num_seqs,
        block_size=resolver.config.cache.block_size,
        target=builder.target(),
    )
    proposer: Proposer = resolver.build(choice, context)
    if not isinstance(proposer.requirements, Requirements):
        raise PluginContractError(
            f"{choice.info.label} has requirements {proposer.requirements!r}, which are no "
            "Requirements"
        )
    return Drafter(
        proposer=proposer,
        forwards=builder.forwards,
        parts=DraftLayerParts(
            kernels=skeleton.layers.kernels,
            attention=skeleton.attention,
            groups=builder.bind(),
        ),
        layers=builder.layers,
    )


@dataclass(slots=True)
class _Builder:
    """Makes what a proposer asks for."""

    resolver: Resolver
    checkpoint: Checkpoint
    skeleton: Skeleton
    facts: Facts
    layers: LayerFactory | None = None
    forwards: WorkerDraftForwards = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = WorkerDraftForwards(
            max_model_len=self.facts.max_model_len,
            block_size=self.resolver.config.cache.block_size,
        )

    def target(self) -> DraftTarget:
        return DraftTarget(
            model=self.skeleton.model,
            config=self.checkpoint.config,
            dtype=self.facts.dtype,
            kernels=self.skeleton.layers.kernels,
            forwards=self.forwards,
            make_layers=self.make_layers,
            open_checkpoint=self.open_checkpoint,
            build_model=self.build_model,
            read_tokens=self.read_tokens,
        )

    def make_layers(self, checkpoint_format: str) -> LayerFactory:
        if self.layers is not None:
            raise PluginContractError("a proposer can make one set of layers, and has one already")
        section = self.resolver.config.spec_decode.quantization
        quantization = self.resolver.named(_QUANTIZATION, section.name, section.options)
        facts = self.facts
        self.layers = LayerFactory(
            kernels=self.skeleton.layers.kernels,
            quantization=self.resolver.build(
                quantization,
                QuantizationContext(
                    device=facts.device, dtype=facts.dtype, checkpoint_format=checkpoint_format
                ),
            ),
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            device=facts.device,
        )
        return self.layers

    def open_checkpoint(self, path: str | None = None) -> Checkpoint:
        model = self.resolver.config.model
        if path is not None:
            return open_checkpoint(path)
        return open_checkpoint(model.path, revision=model.revision)

    def read_tokens(self, path: str | None = None) -> Sequence[str] | None:
        model = self.resolver.config.model
        with self.open_checkpoint(path) as checkpoint:
            other = model.tokenizer if path is None else None
            if other is None and not has_tokenizer(checkpoint):
                return None
            return load_tokenizer(checkpoint, tokenizer=other).tokens

    def build_model(self, checkpoint: DraftCheckpoint) -> Model:
        architectures = architectures_of(checkpoint)
        refused = []
        for candidate in self.resolver.registry.candidates("models"):
            if isinstance(candidate, RefusedPlugin):
                continue
            reasons = model_reasons(candidate, architectures)
            if not reasons:
                self.resolver.registry.activate(candidate)
                context = ModelContext(
                    config=checkpoint.config,
                    layers=self.make_layers(checkpoint.format),
                    dtype=self.facts.dtype,
                    device=self.facts.device,
                    max_model_len=self.facts.max_model_len,
                )
                model: Model = self.resolver.registry.build(candidate, {}, context, section="model")
                return model
            refused += [f"{candidate.info.name}: {'; '.join(reasons)}"]
        raise ModelLoadError(
            f"no model plugin fits the draft model {checkpoint.name!r}: {'; '.join(refused)}"
        )

    def bind(self) -> tuple[KVCacheSpec, ...]:
        if self.layers is None:
            return ()
        attention = self.skeleton.attention
        if reasons := spec_reasons(attention, self.layers.attention_layers):
            raise ConfigError(
                f"attention {type(attention).__name__} can't run the drafter's layers: "
                f"{'; '.join(reasons)}"
            )
        return bind_layers(self.layers.attention_layers, attention)
