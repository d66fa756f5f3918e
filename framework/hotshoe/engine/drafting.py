"""A proposer, with layers of its own if it has any, built for the model that it drafts for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from hotshoe.config import SpecDecodeConfig
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
from hotshoe.weights.checkpoint import Checkpoint, open_checkpoint, open_model
from hotshoe.worker.draft_forwards import DraftLayerParts, WorkerDraftForwards
from hotshoe.worker.sampling import AcceptanceRule, Leviathan, Typical

logger = logging.getLogger(__name__)

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
        acceptance = resolver.config.spec_decode.acceptance
        if acceptance != "drafter_invariant":
            raise ConfigError(
                f"spec_decode.acceptance is {acceptance!r} but spec_decode.name is none, so there "
                "are no drafts to accept; set spec_decode.name or remove the first"
            )
        return None
    builder = DrafterBuilder(resolver, checkpoint.config, skeleton, facts)
    proposer: Proposer = resolver.build(choice, builder.context())
    if not isinstance(proposer.requirements, Requirements):
        raise PluginContractError(
            f"{choice.info.label} has requirements {proposer.requirements!r}, which are no "
            "Requirements"
        )
    return builder.finish(proposer)


def acceptance_rule(config: SpecDecodeConfig) -> AcceptanceRule | None:
    """What decides which drafts are kept; None = that they are drawn anyway."""
    if config.acceptance == "leviathan":
        logger.info(
            "spec_decode.acceptance=leviathan: sampled tokens keep their distribution, but which "
            "ones a seed gives depends on the drafts"
        )
        return Leviathan()
    if config.acceptance == "typical":
        epsilon, delta = config.typical_epsilon, config.typical_delta
        logger.warning(
            "spec_decode.acceptance=typical CHANGES the distribution of sampled tokens: likely "
            "drafts are kept without a draw (typical_epsilon=%g, typical_delta=%g)",
            epsilon,
            delta,
        )
        return Typical(epsilon=epsilon, delta=delta)
    return None


class DrafterBuilder:
    """Makes what a proposer asks for.

    Args:
        resolver: of the engine's config.
        config: of the target's checkpoint.
        skeleton: of the target.
        facts: of the engine.
    """

    def __init__(
        self, resolver: Resolver, config: Mapping[str, Any], skeleton: Skeleton, facts: Facts
    ) -> None:
        self._resolver = resolver
        self._config = config
        self._skeleton = skeleton
        self._facts = facts
        self._layers: LayerFactory | None = None
        self._forwards = WorkerDraftForwards(
            max_model_len=facts.max_model_len, block_size=resolver.config.cache.block_size
        )

    def context(self) -> ProposerContext:
        """What a proposer is built on."""
        return ProposerContext(
            device=self._facts.device,
            vocab_size=self._skeleton.model.vocab_size,
            max_model_len=self._facts.max_model_len,
            max_num_seqs=self._resolver.config.scheduler.max_num_seqs,
            block_size=self._resolver.config.cache.block_size,
            target=self._target(),
        )

    def finish(self, proposer: Proposer) -> Drafter:
        """A proposer that was built on ``context``, with the layers that it has made.

        Raises:
            ConfigError: if the target's attention can't run them.
        """
        return Drafter(
            proposer=proposer,
            forwards=self._forwards,
            parts=DraftLayerParts(
                kernels=self._skeleton.layers.kernels,
                attention=self._skeleton.attention,
                groups=self._bind(),
            ),
            layers=self._layers,
        )

    def _target(self) -> DraftTarget:
        return DraftTarget(
            model=self._skeleton.model,
            config=self._config,
            dtype=self._facts.dtype,
            kernels=self._skeleton.layers.kernels,
            forwards=self._forwards,
            make_layers=self._make_layers,
            open_checkpoint=self._open_checkpoint,
            build_model=self._build_model,
            read_tokens=self._read_tokens,
        )

    def _make_layers(self, checkpoint_format: str) -> LayerFactory:
        if self._layers is not None:
            raise PluginContractError("a proposer can make one set of layers, and has one already")
        section = self._resolver.config.spec_decode.quantization
        quantization = self._resolver.named(_QUANTIZATION, section.name, section.options)
        self._resolver.resolution.choices[_QUANTIZATION] = quantization
        facts = self._facts
        self._layers = LayerFactory(
            kernels=self._skeleton.layers.kernels,
            quantization=self._resolver.build(
                quantization,
                QuantizationContext(
                    device=facts.device, dtype=facts.dtype, checkpoint_format=checkpoint_format
                ),
            ),
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            device=facts.device,
        )
        return self._layers

    def _open_checkpoint(self, path: str | None = None) -> Checkpoint:
        model = self._resolver.config.model
        if path is not None:
            try:
                return open_checkpoint(path)
            except ModelLoadError as error:
                raise ModelLoadError(f"drafter of {_SECTION}: {error}") from error
        if model.weights == "random":
            raise ModelLoadError(
                "the drafter shares weights of the target's checkpoint, but model.weights is "
                "'random'; use a drafter that brings its own, or set model.weights to 'checkpoint'"
            )
        return open_model(model)

    def _read_tokens(self, path: str | None = None) -> Sequence[str] | None:
        model = self._resolver.config.model
        with open_model(model) if path is None else self._open_checkpoint(path) as checkpoint:
            other = model.tokenizer if path is None else None
            if other is None and not has_tokenizer(checkpoint):
                return None
            return load_tokenizer(checkpoint, tokenizer=other).tokens

    def _build_model(self, checkpoint: DraftCheckpoint) -> Model:
        architectures = architectures_of(checkpoint)
        refused = []
        for candidate in self._resolver.registry.candidates("models"):
            if isinstance(candidate, RefusedPlugin):
                continue
            reasons = model_reasons(candidate, architectures)
            if not reasons:
                self._resolver.registry.activate(candidate)
                context = ModelContext(
                    config=checkpoint.config,
                    layers=self._make_layers(checkpoint.format),
                    dtype=self._facts.dtype,
                    device=self._facts.device,
                    max_model_len=self._facts.max_model_len,
                )
                model: Model = self._resolver.registry.build(
                    candidate, {}, context, section="model"
                )
                return model
            refused += [f"{candidate.info.name}: {'; '.join(reasons)}"]
        raise ModelLoadError(
            f"no model plugin fits the draft model {checkpoint.name!r}: {'; '.join(refused)}"
        )

    def _bind(self) -> tuple[KVCacheSpec, ...]:
        if self._layers is None:
            return ()
        attention = self._skeleton.attention
        if reasons := spec_reasons(attention, self._layers.attention_layers):
            raise ConfigError(
                f"attention {type(attention).__name__} can't run the drafter's layers: "
                f"{'; '.join(reasons)}"
            )
        return bind_layers(self._layers.attention_layers, attention)
