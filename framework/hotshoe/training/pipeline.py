"""From a model to a draft checkpoint: the stages one after another, each going on where it stopped.

FOLDER/conversations   shared by all heads that are trained in this folder
FOLDER/features        shared as well
FOLDER/eagle           a draft checkpoint
FOLDER/medusa          another one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hotshoe.config import ResolvedConfig
from hotshoe.errors import TrainingError
from hotshoe.training.conversations import (
    ConversationFolder,
    ConversationSettings,
    generate_conversations,
    read_conversations,
)
from hotshoe.training.eagle import EagleHead, EagleShape
from hotshoe.training.features import (
    AFTER_NORM,
    Example,
    FeatureFolder,
    FeatureRecorder,
    compute_features,
    fused_layers,
)
from hotshoe.training.heads import DraftHead
from hotshoe.training.medusa import MedusaHeads, head_widths
from hotshoe.training.target import Target, read_target
from hotshoe.training.trainer import Report, Trainer, TrainingSettings
from hotshoe.weights.checkpoint import open_checkpoint

Kind = Literal["eagle", "medusa"]
TRAINING_DEFAULTS: Mapping[Kind, Mapping[str, Any]] = {
    "eagle": {},
    "medusa": {
        "num_draft_steps": 4,
        "weight_decay": 1.0,
        "window": 4,
        "batch_tokens": 2304,
        "num_columns": 2560,
    },
}
"""What differs from the defaults of ``TrainingSettings``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What is generated before a head is trained.

    Attributes:
        num_tokens: tokens of conversations.
        max_minutes: generate no longer than this; None = until ``num_tokens``.
        conversations: how they are made.
    """

    num_tokens: int = 2_000_000
    max_minutes: float | None = None
    conversations: ConversationSettings = field(default_factory=ConversationSettings)


def train_drafter(
    kind: Kind,
    resolved: ResolvedConfig,
    folder: Path,
    data: DataSettings,
    training: TrainingSettings,
    *,
    show_progress: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Generate, compute features, train; what exists in the folder already is used.

    Args:
        kind: of the head.
        resolved: the engine's configuration; its model is the target.
        folder: for everything.
        tell: gets a line per stage.

    Raises:
        TrainingError: if the folder was made with other settings, or the data don't suffice.
        HotshoeError: whatever stands in the engine's way.
    """
    from hotshoe import LLM

    if resolved.config.model.weights == "random":
        raise TrainingError(
            "model.weights is 'random': what such a model says can't be learned; set it to "
            "'checkpoint'"
        )
    identity = _model_identity(resolved)
    conversations = ConversationFolder(
        folder / "conversations", identity | asdict(data.conversations)
    )
    with LLM.from_config(resolved) as llm:
        num_tokens = generate_conversations(
            llm,
            conversations,
            data.conversations,
            num_tokens=data.num_tokens,
            max_minutes=data.max_minutes,
            show_progress=show_progress,
        )
    tell(f"conversations: {num_tokens} tokens in {str(conversations.path)!r}")
    with open_checkpoint(
        resolved.config.model.path, revision=resolved.config.model.revision
    ) as checkpoint:
        target = read_target(checkpoint)
    examples = _features(
        resolved, folder, identity, fused_layers(target.num_layers), show_progress=show_progress
    )
    tell(f"features: {len(examples)} conversations in {str(folder / 'features')!r}")
    trainer = Trainer(_head(kind, target, training), target, examples, folder / kind, training)
    return trainer.run(show_progress=show_progress)


def _features(
    resolved: ResolvedConfig,
    folder: Path,
    identity: dict[str, Any],
    layers: tuple[int, ...],
    *,
    show_progress: bool,
) -> list[Example]:
    from hotshoe import LLM

    features = FeatureFolder(folder / "features", identity | {"layers": layers})
    conversations = read_conversations(folder / "conversations")
    if not features.holds(len(conversations)):
        recorder = FeatureRecorder((*layers, AFTER_NORM))
        with LLM.from_config(_without_prefix_caching(resolved), {"spec_decode": recorder}) as llm:
            compute_features(llm, recorder, conversations, features, show_progress=show_progress)
    return list(features.examples())


def _without_prefix_caching(resolved: ResolvedConfig) -> ResolvedConfig:
    """Every token of every prompt has to be computed to be seen."""
    config = resolved.config
    cache = config.cache.model_copy(update={"enable_prefix_caching": False})
    return replace(resolved, config=config.model_copy(update={"cache": cache}))


def _head(kind: Kind, target: Target, training: TrainingSettings) -> DraftHead:
    if kind == "medusa":
        return MedusaHeads(
            target.hidden_size, head_widths(target.hidden_size, training.num_draft_steps)
        )
    return EagleHead(EagleShape.of(target.config), fused_layers(target.num_layers))


def _model_identity(resolved: ResolvedConfig) -> dict[str, Any]:
    """What makes the same model say the same."""
    model = resolved.config.model
    return {
        "model": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "tokenizer": model.tokenizer,
        "chat_template": model.chat_template,
        "quantization": resolved.config.quantization.name,
    }
