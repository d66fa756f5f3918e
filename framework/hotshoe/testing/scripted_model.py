"""A ``models`` plugin that says what a test tells it to: a request's first token picks a script,
and the script has the logits after each position.

It runs in the real engine on a real KV cache: an attention layer looks the first token up, so a
request that is given another one's pages falls out of its script. ``write_scripted_checkpoint``
makes a model folder; an entry point of the group ``hotshoe.models`` that names this module makes
the plugin selectable, which ``installed_scripted_model`` sees to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hotshoe.api import (
    CheckpointTensor,
    Component,
    Model,
    ModelCapabilities,
    ModelContext,
    PluginOptions,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.api.layers import ForwardStep

ARCHITECTURE = "ScriptedForCausalLM"
HEAD_DIM = 16
MAX_SCRIPTS = 256
"""More than half precision counts exactly."""

SCRIPTED_LOGIT = 30.0
"""Of a scripted token, where the others have 0: it's drawn with certainty at temperature 1."""


@contextmanager
def installed_scripted_model(
    root: Path, scripts: Sequence[Sequence[int]] | Tensor
) -> Iterator[Path]:
    """Write a model folder, and let this process find the plugin until the end of the block.

    Args:
        root: folder for both.
        scripts: as of ``write_scripted_checkpoint``.
    """
    import pytest

    from hotshoe.testing.plugins import make_distribution

    entry_points = {"hotshoe.models": {"scripted": __name__}}
    site = make_distribution(root / "site", modules={}, entry_points=entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield write_scripted_checkpoint(root / "model", scripts)


def write_scripted_checkpoint(
    path: Path,
    scripts: Sequence[Sequence[int]] | Tensor,
    *,
    vocab_size: int | None = None,
    max_model_len: int = 1024,
    tokenizer: bool = True,
) -> Path:
    """Write a folder that ``LLM(model=...)`` opens with this plugin.

    Args:
        path: folder, made if needed.
        scripts: script ``t % len(scripts)`` is that of requests whose first token is ``t``; its
            entry ``p`` is the token at position ``p + 1``, or ``[num_scripts, num_positions,
            vocab_size]`` logits of it. Entries within the prompt are not used; past its end, the
            last entry of a script holds.
        vocab_size: by default that of the byte tokenizer; taken from the logits if those are given.
        max_model_len: longest request.
        tokenizer: whether to write the byte tokenizer of ``hotshoe.testing.models`` too.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import save_file

    from hotshoe.testing.models import IM_END, TINY_VOCAB_SIZE, write_byte_tokenizer

    if isinstance(scripts, torch.Tensor):
        logits = scripts.float()
    else:
        logits = _logits(scripts, vocab_size or TINY_VOCAB_SIZE)
    num_scripts, num_positions, vocab_size = logits.shape
    if not 0 < num_scripts <= MAX_SCRIPTS:
        raise ValueError(f"there may be 1 to {MAX_SCRIPTS} scripts, got {num_scripts}")
    config = {
        "architectures": [ARCHITECTURE],
        "vocab_size": vocab_size,
        "hidden_size": vocab_size,
        "num_scripts": num_scripts,
        "num_positions": num_positions,
        "max_position_embeddings": max_model_len,
        "eos_token_id": IM_END,
        "torch_dtype": "float32",
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    table = logits.reshape(-1, vocab_size).contiguous()
    save_file({"scripts.weight": table}, path / "model.safetensors", {"format": "pt"})
    if tokenizer:
        write_byte_tokenizer(path)
    return path


def build(options: PluginOptions, context: ModelContext) -> Model:
    """The model; its table of logits comes from the checkpoint."""
    return ScriptedModel(context)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="model/0",
        factory=build,
        capabilities=ModelCapabilities(architectures=(ARCHITECTURE,)),
    )


class ScriptedModel(Model):
    """Its hidden states are the logits themselves."""

    def __init__(self, context: ModelContext) -> None:
        config, layers = context.config, context.layers
        self.vocab_size = self.hidden_size = config["vocab_size"]
        self._num_scripts = config["num_scripts"]
        self._num_positions = config["num_positions"]
        self._table = layers.embedding(
            "scripts", self._num_scripts * self._num_positions, self.vocab_size
        )
        self._attention = layers.attention(num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM)
        self._dtype = context.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        scripts = self._scripts(token_ids, positions, step)
        entries = positions.clamp(max=self._num_positions - 1)
        logits = self._table(scripts * self._num_positions + entries)
        for layer_index in (0, -1):
            if step.wants(layer_index):
                step.hidden_states[layer_index] = logits
        return logits

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def load_tensor(self, tensor: CheckpointTensor) -> bool:
        if tensor.name != "scripts.weight":
            return False
        self._table.load(tensor)
        return True

    def _scripts(self, token_ids: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """Each token's script: the value at its request's first position, which alone has a key."""
        num_tokens = token_ids.shape[0]
        q = token_ids.new_ones((num_tokens, 2, HEAD_DIM), dtype=self._dtype)
        # 4 * HEAD_DIM logits above the others: their weight is below 1e-27
        first = (positions == 0).to(self._dtype) * HEAD_DIM
        k = first.view(-1, 1, 1).expand(-1, 1, HEAD_DIM).contiguous()
        script = (token_ids % self._num_scripts).to(self._dtype)
        v = script.view(-1, 1, 1).expand(-1, 1, HEAD_DIM).contiguous()
        found = self._attention(q, k, v, positions, step)[:, 0, 0]
        return found.round().long().clamp(0, self._num_scripts - 1)


def _logits(scripts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    import torch

    num_positions = max(len(script) for script in scripts)
    logits = torch.zeros(len(scripts), num_positions, vocab_size)
    for i, script in enumerate(scripts):
        padded = [*script, *[script[-1]] * (num_positions - len(script))]
        logits[i, torch.arange(num_positions), torch.tensor(padded)] = SCRIPTED_LOGIT
    return logits
