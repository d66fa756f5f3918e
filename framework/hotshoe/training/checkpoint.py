"""Draft checkpoints: ``config.json``, ``model.safetensors`` and a model card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from hotshoe.training.heads import DraftHead, vocab_tensors
from hotshoe.training.target import Target

if TYPE_CHECKING:
    from hotshoe.training.trainer import Report

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
REPORT_FILE = "report.json"


def write_checkpoint(
    folder: Path, head: DraftHead, target: Target, draft_vocab: Tensor, *, report: Report
) -> None:
    """Write a head in the layout that drafters read, bfloat16, and how it did.

    Embedding and output head are left out: they are the target's.
    """
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    weights |= vocab_tensors(draft_vocab, target.vocab_size)
    part = folder / f"{WEIGHTS_FILE}.part"
    part.write_bytes(save(weights, {"format": "pt"}))  # readable by whom the umask lets
    part.replace(folder / WEIGHTS_FILE)
    config = head.checkpoint_config(target, len(draft_vocab))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
