"""Which checkpoints drafters read, and which they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafts.heads import (
    HIDDEN,
    VOCAB,
    eagle3_tensors,
    layer_config,
    random_matrix,
    write,
    write_eagle1,
    write_eagle3,
    write_medusa,
    write_normed_eagle1,
)
from hotshoe.api import Component, ModelLoadError
from hotshoe.errors import ConfigError
from hotshoe.testing.drafting import DraftedRequest, DraftingRig
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe_spec_decode import draft_model, eagle, medusa

TOKENS = [list(range(20, 50)), [9, 8, 7, 6, 5]]


def rig_with(component: Component, target: Path, model: Path, **options: Any) -> DraftingRig:
    rig = DraftingRig(str(target), dtype="float32", max_model_len=128, max_num_seqs=2)
    options = {"model": str(model)} | options
    rig.use(component.factory(component.options(**options), rig.context()))
    return rig


def drafts_of(component: Component, target: Path, model: Path, **options: Any) -> list[list[int]]:
    """Behind ``TOKENS``."""
    step = {
        str(index): DraftedRequest(token_ids=tokens, num_kept=len(tokens) - 1, max_draft_tokens=4)
        for index, tokens in enumerate(TOKENS)
    }
    drafts = rig_with(component, target, model, **options).step(step).token_ids
    assert all(drafts)
    return [list(chain) for chain in drafts]


def eagle_drafts(target: Path, model: Path) -> list[list[int]]:
    return drafts_of(eagle.hotshoe_component(), target, model)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def renamed(tensors: dict[str, Tensor], **prefixes: str) -> dict[str, Tensor]:
    """With other names; prefixes are written with ``__`` for a dot."""
    result = {}
    for name, tensor in tensors.items():
        for old, new in prefixes.items():
            dotted = old.replace("__", ".")
            if name.startswith(dotted):
                name = new + name.removeprefix(dotted)
        result[name] = tensor
    return result


# -- layouts --------------------------------------------------------------------------------


def test_an_eagle3_head_is_the_same_in_every_layout(tmp_path: Path, tiny_path: Path) -> None:
    lean = write_eagle3(tmp_path / "lean")
    config, tensors = read(lean)
    shared = load_file(tiny_path / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    full = tensors | {
        "lm_head.weight": shared["lm_head.weight"][ids],
        "embed_tokens.weight": shared["model.embed_tokens.weight"].clone(),
    }
    speculators = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 1, 2],
        "transformer_layer_config": layer_config(),
    }
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(config))
    torch.save(full, pickled / "pytorch_model.bin")

    expected = eagle_drafts(tiny_path, lean)

    assert eagle_drafts(tiny_path, write(tmp_path / "full", config, full)) == expected
    assert eagle_drafts(tiny_path, pickled) == expected
    other = write(tmp_path / "other", speculators, renamed(full, midlayer__="layers.0."))
    assert eagle_drafts(tiny_path, other) == expected


def test_an_eagle1_head_is_the_same_in_every_layout(tmp_path: Path, tiny_path: Path) -> None:
    folder = write_eagle1(tmp_path / "head")
    _, tensors = read(folder)
    speculators = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": layer_config(),
    }
    names = renamed(tensors, layers__0__="transformer.", fc__="fusion_fc.")
    other = write(tmp_path / "other", speculators, names)

    assert eagle_drafts(tiny_path, other) == eagle_drafts(tiny_path, folder)


def test_a_head_takes_what_it_lacks_from_a_tied_target(tmp_path: Path) -> None:
    target = write_tiny_checkpoint(tmp_path / "tied", tiny_llama_config(tie_word_embeddings=True))
    config, tensors = read(write_eagle3(tmp_path / "lean"))
    shared = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    full = tensors | {"lm_head.weight": shared[ids]}

    expected = eagle_drafts(target, write(tmp_path / "full", config, full))
    assert eagle_drafts(target, tmp_path / "lean") == expected
    lean_medusa = write_medusa(tmp_path / "medusa", is_lean=True)
    assert drafts_of(medusa.hotshoe_component(), target, lean_medusa)


def test_medusa_heads_share_the_rows_that_d2t_names(tmp_path: Path, tiny_path: Path) -> None:
    lean = write_medusa(tmp_path / "lean", is_lean=True)
    config, tensors = read(lean)
    ids = torch.arange(0, VOCAB, 2)
    reduced = tensors | {"d2t": ids - torch.arange(len(ids))}
    head = load_file(tiny_path / "model.safetensors")["lm_head.weight"]
    own = reduced | {f"{place}.1.weight": head[ids].clone() for place in range(3)}
    component = medusa.hotshoe_component()

    drafts = drafts_of(component, tiny_path, write(tmp_path / "reduced", config, reduced))

    assert all(token_id % 2 == 0 for chain in drafts for token_id in chain)
    assert drafts == drafts_of(component, tiny_path, write(tmp_path / "own", config, own))


def test_only_as_many_medusa_heads_are_used_as_are_asked_for(
    tmp_path: Path, tiny_path: Path
) -> None:
    component, heads = medusa.hotshoe_component(), write_medusa(tmp_path / "heads")
    all_drafts = drafts_of(component, tiny_path, heads)
    assert [len(chain) for chain in all_drafts] == [3, 3]
    drafts = drafts_of(component, tiny_path, heads, num_draft_tokens=2)
    assert drafts == [chain[:2] for chain in all_drafts]


# -- refusals -------------------------------------------------------------------------------


def changed(**more: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update(more)

    return change


def with_tensors(**more: Tensor) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.update({name.replace("__", "."): tensor for name, tensor in more.items()})

    return change


def without(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


LAYER_IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("fc.weight"),
            r"is no EAGLE head: known ones have tensors 'fc' and 'midlayer\.\*'; "
            r"'fc' and 'layers\.0\.\*'; 'fusion_fc' and 'transformer\.\*'$",
        ),
        (without("norm.weight"), "the checkpoint has no weight for 'norm'"),
        (
            with_tensors(extra__weight=torch.ones(2), q=torch.ones(1)),
            "2 tensors that an EAGLE-3 head doesn't know: 'extra.weight', 'q'",
        ),
        (
            with_tensors(fc__weight=torch.ones(HIDDEN, 3 * 32)),
            r"'fc.weight' of the drafter has shape \(64, 96\), .* 3 x 64 of the target needs "
            r"\(64, 192\); was it trained for this model\?",
        ),
        (
            with_tensors(d2t=torch.full((100,), VOCAB)),
            "'d2t' of the drafter names token id 259, but the target has 259 tokens",
        ),
        (
            with_tensors(lm_head__weight=torch.ones(90, HIDDEN)),
            "lm_head has 90 rows, but 'd2t' has 100 tokens",
        ),
        (
            with_tensors(embed_tokens__weight=torch.ones(200, HIDDEN)),
            "'embed_tokens.weight' of the drafter has 200 rows, but the target has 259 tokens",
        ),
        (changed(**LAYER_IDS), r"reads layers \[0, 1, 2\] of the target, allowed: 1 to 2; set "),
        (changed(eagle_config=None), r"reads layers \[2, 1, -1\] of the target, allowed: 1 to 2"),
        (changed(hidden_act="gelu"), "hidden_act 'gelu', which is not supported; allowed: 'silu'"),
        (changed(num_hidden_layers=2), "num_hidden_layers 2, which is not supported; allowed: 1"),
        (changed(num_attention_heads=None), "'num_attention_heads' must be a whole number"),
        *(
            (changed(**{field: True}), f"has {field} true, which is not supported for EAGLE-3")
            for field in ("layernorms", "norm_before_fc", "fc_norm", "norm_output")
        ),
        (changed(fusion_bias=True), "fusion_bias True, but no tensor 'fc.bias'; correct its"),
    ],
)
def test_an_eagle_head_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    message: str,
    tmp_path: Path,
    tiny_path: Path,
) -> None:
    config, tensors = read(write_eagle3(tmp_path / "good"))
    change(config, tensors)
    bad = write(tmp_path / "bad", config, tensors)
    with pytest.raises(ModelLoadError, match=message):
        rig_with(eagle.hotshoe_component(), tiny_path, bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(layernorms=False), "3 tensors that an EAGLE-1 head doesn't know: 'embedding_lay"),
        (without("embedding_layernorm.weight"), "has no weight for 'embedding_layernorm'"),
        (without("pre_lm_head_layernorm.weight"), "has no weight for 'pre_lm_head_layernorm'"),
        (changed(fusion_bias=False), "fusion_bias False, but a tensor 'fusion_fc.bias'; correct"),
        (changed(norm_before_residual=True), "norm_before_residual true, .* for EAGLE-1 heads"),
    ],
)
def test_an_eagle1_head_with_norms_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    message: str,
    tmp_path: Path,
    tiny_path: Path,
) -> None:
    config, tensors = read(write_normed_eagle1(tmp_path / "good"))
    change(config, tensors)
    bad = write(tmp_path / "bad", config, tensors)
    with pytest.raises(ModelLoadError, match=message):
        rig_with(eagle.hotshoe_component(), tiny_path, bad)


def test_norms_of_an_eagle1_head_in_its_authors_layout_are_refused(
    tmp_path: Path, tiny_path: Path
) -> None:
    config, tensors = read(write_eagle1(tmp_path / "good"))
    bad = write(tmp_path / "bad", config | {"layernorms": True}, tensors)
    with pytest.raises(ModelLoadError, match="has layernorms true, which is not supported for "):
        rig_with(eagle.hotshoe_component(), tiny_path, bad)


def test_a_head_of_another_size_needs_embedding_and_head_of_its_own(
    tmp_path: Path, tiny_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = write_tiny_checkpoint(
        tmp_path / "wide", tiny_llama_config(hidden_size=128, num_attention_heads=8)
    )
    tensors = eagle3_tensors(1, 100) | {"fc.weight": random_matrix(generator, HIDDEN, 3 * 128)}
    config = layer_config(eagle_aux_hidden_state_layer_ids=[1, 1, 2])
    lean = write(tmp_path / "lean", config, tensors)
    message = "hidden_size is 64 and the target's 128, but it shares the target's embed_tokens, lm"
    with pytest.raises(ModelLoadError, match=message):
        rig_with(eagle.hotshoe_component(), wide, lean)
    own = tensors | {
        "embed_tokens.weight": random_matrix(generator, VOCAB, HIDDEN),
        "lm_head.weight": random_matrix(generator, 100, HIDDEN),
    }
    assert eagle_drafts(wide, write(tmp_path / "own", config, own))


def test_medusa_heads_that_do_not_fit_are_refused(tmp_path: Path, tiny_path: Path) -> None:
    component = medusa.hotshoe_component()
    config, tensors = read(write_medusa(tmp_path / "good"))
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 4 but .* has 3 heads; lower it"):
        rig_with(component, tiny_path, tmp_path / "good", num_draft_tokens=4)
    for bad, message in (
        ({"a": torch.ones(2)}, "holds no Medusa heads: known ones have tensors '0.0.linear"),
        (
            {name: one for name, one in tensors.items() if name != "1.1.weight"},
            "has 3 Medusa heads that are not alike; expected 1 blocks in each, and a matrix in all",
        ),
        (tensors | {"b": torch.ones(1)}, "1 tensors that a set of Medusa heads doesn't know: 'b'"),
        (
            tensors | {"0.0.linear.weight": torch.ones(32, 32)},
            r"'0.0.linear.weight' of the drafter has shape \(32, 32\), but .* 64 needs \(64, 64\)",
        ),
        (
            tensors | {"1.0.proj.weight": torch.ones(64, 96)},
            r"'1.0.proj.weight' of the drafter has shape \(64, 96\), but .* 64 needs \(64, 64\)",
        ),
    ):
        with pytest.raises(ModelLoadError, match=message):
            rig_with(component, tiny_path, write(tmp_path / "bad", config, bad))


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path, tiny_path: Path) -> None:
    component = draft_model.hotshoe_component()
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    tokenizer = other / "tokenizer.json"
    vocab = json.loads(tokenizer.read_text())
    tokens = vocab["model"]["vocab"]
    tokens["A"], tokens["B"] = tokens["B"], tokens["A"]
    tokenizer.write_text(json.dumps(vocab))
    message = "token 65 of draft model '.*' is 'B' and the target's is 'A'; choose one with the"
    with pytest.raises(ModelLoadError, match=message):
        rig_with(component, tiny_path, other)


def test_a_draft_model_may_be_padded_in_another_way_but_not_without_a_tokenizer(
    tmp_path: Path, tiny_path: Path
) -> None:
    component = draft_model.hotshoe_component()
    for vocab_size in (VOCAB + 5, VOCAB - 1):
        config = tiny_llama_config(vocab_size=vocab_size)
        padded = write_tiny_checkpoint(tmp_path / str(vocab_size), config, seed=1)
        drafts = drafts_of(component, tiny_path, padded)
        assert all(token_id < VOCAB for chain in drafts for token_id in chain)
        for file in padded.glob("tokenizer*"):
            file.unlink()
        message = rf"have vocabularies of {vocab_size} and {VOCAB} tokens; choose one with the"
        with pytest.raises(ModelLoadError, match=message):
            rig_with(component, tiny_path, padded)


def test_weights_of_a_drafter_are_quantized_as_the_config_says(
    tmp_path: Path, tiny_path: Path
) -> None:
    head = write_eagle3(tmp_path / "head")
    settings: dict[str, Any] = {"spec_decode": {"quantization": "int8"}, "kernels": "cpu"}
    rig = DraftingRig(str(tiny_path), dtype="float32", max_model_len=64, **settings)
    proposer = eagle.build(eagle.EagleOptions(model=str(head)), rig.context())
    rig.use(proposer)
    step = {"a": DraftedRequest(token_ids=[1, 2, 3], num_kept=2, max_draft_tokens=4)}
    assert len(rig.step(step).token_ids[0]) == 4
