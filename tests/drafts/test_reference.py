"""Drafters draft what the papers' formulas give, whatever the steps were that led there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafts.heads import (
    VOCAB,
    write_eagle1,
    write_eagle3,
    write_medusa,
    write_normed_eagle1,
)
from drafts.reference import eagle_drafts, medusa_drafts
from hotshoe.api import Component
from hotshoe.testing.drafting import DraftedRequest, DraftingRig
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe_spec_decode import draft_model, eagle, medusa

NUM_DRAFTS = 3
BLOCK_SIZE = 8
MAX_MODEL_LEN = 128
KERNELS = [
    {"kernels": "torch", "attention": "torch_sdpa"},
    {"kernels": "cpu", "attention": "cpu"},
]

Expected = Callable[[Sequence[int], int], list[int]]
"""Drafts behind some tokens."""


class TargetModel:
    """The target in transformers, and what its layers give for a sequence."""

    def __init__(self, path: Path) -> None:
        from transformers import LlamaForCausalLM

        self.model: Any = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(index))
        self.model.model.norm.register_forward_hook(self._keep(-1))

    def _keep(self, index: int) -> Callable[..., None]:
        def hook(module: object, inputs: object, output: Any) -> None:
            values = output if isinstance(output, Tensor) else output[0]
            self._outputs[index] = values.view(-1, values.shape[-1]).detach()

        return hook

    @torch.no_grad()
    def features(self, token_ids: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
        self.model(torch.tensor([list(token_ids)]))
        return [self._outputs[layer] for layer in layers]

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(token_ids) :]


@pytest.fixture(scope="module")
def target(tiny_path: Path) -> TargetModel:
    return TargetModel(tiny_path)


def weights_of(folder: Path, target: TargetModel) -> dict[str, Tensor]:
    """Of a head, with what it shares with the target."""
    weights = load_file(folder / "model.safetensors")
    shared = dict(target.model.named_parameters())
    weights.setdefault("embed_tokens.weight", shared["model.embed_tokens.weight"].detach())
    head = shared["lm_head.weight"].detach()
    if "d2t" in weights:
        head = head[weights["d2t"] + torch.arange(len(weights["d2t"]))]
    weights.setdefault("lm_head.weight", head)
    return weights


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@dataclass
class Walk:
    """Random steps of some requests through random tokens: prompts in chunks, rounds in which some
    of the drafts are kept, rounds without drafts, preemptions.
    """

    rig: DraftingRig
    numbers: random.Random
    tokens: dict[str, list[int]]
    computed: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    offered: dict[str, list[int]] = field(default_factory=dict)

    def run(self, num_steps: int, expected: Expected) -> int:
        """Step, and compare every draft; how many there were."""
        num_compared = 0
        for _ in range(num_steps):
            chosen = self.numbers.sample(sorted(self.tokens), self.numbers.randint(1, 3))
            step = {name: self.request(name) for name in chosen if self.has_more(name)}
            if not step:
                break
            drafts = self.rig.step(step).token_ids
            for (name, one), found in zip(step.items(), drafts, strict=True):
                self.offered[name] = list(found)
                if one.max_draft_tokens:
                    assert found == expected(one.token_ids, one.max_draft_tokens)
                    num_compared += 1
                else:
                    assert found == []
        return num_compared

    def has_more(self, name: str) -> bool:
        return self.known.get(name, 0) + NUM_DRAFTS + 1 < len(self.tokens[name])

    def request(self, name: str) -> DraftedRequest:
        tokens, numbers = self.tokens[name], self.numbers
        known = self.known.setdefault(name, numbers.randint(1, 40))
        computed = self.computed.setdefault(name, 0)
        if computed and numbers.random() < 0.05:
            computed = BLOCK_SIZE * numbers.randint(0, computed // BLOCK_SIZE)
            self.rig.restart(name, computed)
            self.offered[name] = []
        offered = self.offered.get(name, [])
        num_accepted = numbers.randint(0, len(offered))
        if known - computed > 1 or computed == 0:
            num_accepted, offered = 0, []
            num_kept = numbers.randint(1, known - computed)
        else:
            num_kept = 1 + num_accepted
            tokens[known : known + num_accepted] = offered[:num_accepted]
        has_token = computed + num_kept >= known
        if has_token:
            known = computed + num_kept + 1
        self.computed[name], self.known[name] = computed + num_kept, known
        return DraftedRequest(
            token_ids=tokens[:known],
            num_kept=num_kept,
            refused=offered[num_accepted:],
            is_verified=bool(offered),
            max_draft_tokens=numbers.choice([0, 1, NUM_DRAFTS, NUM_DRAFTS]) if has_token else 0,
        )


def walk(
    component: Component,
    options: Mapping[str, Any],
    target_path: Path,
    kernels: Mapping[str, Any],
    expected: Expected,
) -> int:
    rig = DraftingRig(
        str(target_path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        cache={"block_size": BLOCK_SIZE},
        **kernels,
    )
    rig.use(component.factory(component.options(**options), rig.context()))
    numbers = random.Random(11)
    tokens = {name: [numbers.randrange(VOCAB) for _ in range(90)] for name in "abc"}
    return Walk(rig, numbers, tokens).run(90, expected)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one["kernels"])
def test_eagle3_drafts_what_its_paper_says(
    kernels: dict[str, Any], tmp_path: Path, tiny_path: Path, target: TargetModel
) -> None:
    folder = write_eagle3(tmp_path / "head")
    weights, config = weights_of(folder, target), config_of(folder)

    def expected(token_ids: Sequence[int], count: int) -> list[int]:
        features = lambda ids: target.features(ids, (0, 0, 1))  # noqa: E731
        return eagle_drafts(config, weights, features, token_ids, count)

    options = {"model": str(folder), "num_draft_tokens": NUM_DRAFTS}
    assert walk(eagle.hotshoe_component(), options, tiny_path, kernels, expected) > 50


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one["kernels"])
@pytest.mark.parametrize("write_head", [write_eagle1, write_normed_eagle1])
def test_eagle1_drafts_what_its_paper_says(
    write_head: Callable[[Path], Path],
    kernels: dict[str, Any],
    tmp_path: Path,
    tiny_path: Path,
    target: TargetModel,
) -> None:
    folder = write_head(tmp_path / "head")
    weights, config = weights_of(folder, target), config_of(folder)
    config = config.get("transformer_layer_config", config)

    def expected(token_ids: Sequence[int], count: int) -> list[int]:
        features = lambda ids: target.features(ids, (-1,))  # noqa: E731
        return eagle_drafts(config, weights, features, token_ids, count)

    options = {"model": str(folder), "num_draft_tokens": NUM_DRAFTS}
    assert walk(eagle.hotshoe_component(), options, tiny_path, kernels, expected) > 50


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one["kernels"])
@pytest.mark.parametrize(("is_lean", "width"), [(False, None), (True, None), (True, 96)])
def test_medusa_drafts_what_its_paper_says(
    kernels: dict[str, Any],
    is_lean: bool,
    width: int | None,
    tmp_path: Path,
    tiny_path: Path,
    target: TargetModel,
) -> None:
    folder = write_medusa(tmp_path / "heads", num_blocks=2, width=width, is_lean=is_lean)
    weights = weights_of(folder, target)
    for head in range(NUM_DRAFTS):
        weights.setdefault(f"{head}.2.weight", weights["lm_head.weight"])

    def expected(token_ids: Sequence[int], count: int) -> list[int]:
        hidden = target.features(token_ids[:-1], (-1,))[0][-1]
        return medusa_drafts(weights, hidden, NUM_DRAFTS, 2)[:count]

    options = {"model": str(folder)}
    assert walk(medusa.hotshoe_component(), options, tiny_path, kernels, expected) > 50


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one["kernels"])
def test_a_draft_model_drafts_what_it_would_generate(
    kernels: dict[str, Any], tmp_path: Path, tiny_path: Path
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "small", seed=5)
    model = TargetModel(folder)

    options = {"model": str(folder), "num_draft_tokens": NUM_DRAFTS}
    assert walk(draft_model.hotshoe_component(), options, tiny_path, kernels, model.greedy) > 50
