"""``hotshoe train-drafter`` on a tiny random model: data, features, training, checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hotshoe.entrypoints.cli.main import main
from hotshoe.training.conversations import read_conversations

DATA = ("--round-size", "16", "--held-out-share", "0.3", "--max-answer-tokens", "24")
STEPS = 4


def train(kind: str, folder: Path, model: Path, *arguments: str) -> int:
    """Run the command; later flags win over the ones given here."""
    return main(
        [
            *("train-drafter", kind, str(folder), "--model", str(model), *DATA),
            *("--num-tokens", "1500", "--max-steps", str(STEPS), "--measure-every", "2"),
            *("--draft-vocab-size", "200", *arguments),
        ]
    )


@pytest.fixture(scope="module")
def trained(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which an EAGLE head and Medusa heads were trained; not to be changed."""
    folder = tmp_path_factory.mktemp("train")
    assert train("eagle", folder, tiny_path) == 0
    assert train("medusa", folder, tiny_path) == 0
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "train"))


def report(folder: Path, kind: str = "eagle") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / kind / "report.json").read_text())
    return found


def test_an_eagle_checkpoint_has_the_layout_that_its_config_names(trained: Path) -> None:
    config = json.loads((trained / "eagle" / "config.json").read_text())
    weights = load_file(trained / "eagle" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 1, 2]
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    assert shapes == {
        "fc.weight": [64, 192],
        "midlayer.hidden_norm.weight": [64],
        "midlayer.input_layernorm.weight": [64],
        "midlayer.post_attention_layernorm.weight": [64],
        "midlayer.self_attn.q_proj.weight": [64, 128],
        "midlayer.self_attn.k_proj.weight": [32, 128],
        "midlayer.self_attn.v_proj.weight": [32, 128],
        "midlayer.self_attn.o_proj.weight": [64, 64],
        "midlayer.mlp.gate_proj.weight": [128, 64],
        "midlayer.mlp.up_proj.weight": [128, 64],
        "midlayer.mlp.down_proj.weight": [64, 128],
        "norm.weight": [64],
        "d2t": [200],
        "t2d": [259],
    }
    drafted = torch.arange(200) + weights["d2t"]
    assert drafted.tolist() == weights["t2d"].nonzero().flatten().tolist()
    assert {weights[name].dtype for name in shapes if "weight" in name} == {torch.bfloat16}


def test_the_first_medusa_head_has_the_widest_block(trained: Path) -> None:
    config = json.loads((trained / "medusa" / "config.json").read_text())
    weights = load_file(trained / "medusa" / "model.safetensors")
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (4, 1)
    for head, width in enumerate((128, 64, 64, 32)):
        assert weights.pop(f"{head}.0.linear.weight").shape == (width, 64)
        assert weights.pop(f"{head}.0.linear.bias").shape == (width,)
        assert weights.pop(f"{head}.0.proj.weight").shape == (64, width)
    assert set(weights) == {"d2t", "t2d"}


@pytest.mark.parametrize(("kind", "num_steps"), [("eagle", 30), ("medusa", 150)])
def test_training_lowers_the_loss(
    kind: str, num_steps: int, copied: Path, tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / kind)
    assert train(kind, copied, tiny_path, "--max-steps", "1") == 0
    first = report(copied, kind)["losses"]
    shutil.rmtree(copied / kind)
    assert train(kind, copied, tiny_path, "--max-steps", str(num_steps)) == 0
    assert all(
        last < start for last, start in zip(report(copied, kind)["losses"], first, strict=True)
    )
    assert "held-out conversations, greedy:" in capsys.readouterr().out


def test_the_same_seed_and_steps_give_the_same_data_and_head(
    trained: Path, tiny_path: Path, tmp_path: Path
) -> None:
    assert train("eagle", tmp_path, tiny_path) == 0
    for name in ("conversations/conversations.jsonl", "eagle/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_a_run_that_was_cut_short_goes_on_to_the_same_result(
    trained: Path, copied: Path, tiny_path: Path
) -> None:
    data = copied / "conversations" / "conversations.jsonl"
    whole = data.read_bytes()
    assert whole.count(b"\n") > 1
    data.write_bytes(whole[: whole.index(b"\n") + 100])  # in the midst of the second round
    shutil.rmtree(copied / "features")
    shutil.rmtree(copied / "eagle")
    assert train("eagle", copied, tiny_path) == 0
    assert data.read_bytes() == whole
    weights = "eagle/model.safetensors"
    assert (copied / weights).read_bytes() == (trained / weights).read_bytes()


def test_training_that_was_stopped_goes_on_from_its_last_checkpoint(
    trained: Path, copied: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copied / "eagle")

    class Stopped(Exception):
        pass

    from hotshoe.training import trainer

    measure = trainer.measure_acceptance

    def stop_after_first(*arguments: Any, **settings: Any) -> Any:
        if (copied / "eagle" / trainer.STATE_FILE).exists():
            raise Stopped
        return measure(*arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "measure_acceptance", stop_after_first)
        with pytest.raises(Stopped):
            train("eagle", copied, tiny_path)
    assert report(copied)["step"] == STEPS / 2
    assert train("eagle", copied, tiny_path) == 0
    assert report(copied)["step"] == STEPS
    weights = "eagle/model.safetensors"
    assert (copied / weights).read_bytes() == (trained / weights).read_bytes()


def test_held_out_conversations_are_known_by_their_first_turn_and_never_repeated(
    trained: Path,
) -> None:
    conversations = read_conversations(trained / "conversations")
    held_out = {one.token_ids for one in conversations if one.is_held_out}
    others = {one.token_ids for one in conversations if not one.is_held_out}
    assert held_out
    assert others
    first_turns = [one.token_ids[: one.answers[0][0]] for one in conversations]
    assert len(set(first_turns)) == len(first_turns)


def test_answers_are_what_the_target_says(trained: Path, tiny_path: Path) -> None:
    from hotshoe import LLM, SamplingParams

    greedy = [one for one in read_conversations(trained / "conversations") if one.is_greedy][:4]
    with LLM(str(tiny_path)) as llm:
        for one in greedy:
            start, end = one.answers[-1]
            params = SamplingParams(temperature=0.0, max_tokens=24)
            (output,) = llm.generate([list(one.token_ids[:start])], params)
            assert output.outputs[0].token_ids == list(one.token_ids[start:end])


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_trained_head_drafts_in_the_engine_and_changes_nothing(
    kind: str, trained: Path, tiny_path: Path
) -> None:
    from hotshoe import LLM, SamplingParams

    drafter = {
        "name": kind,
        "options": {"model": str(trained / kind)},
        "adaptive": False,
    }
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(str(tiny_path), max_model_len=256) as llm:
        plain = llm.generate(["one", "another"], params)
    with LLM(str(tiny_path), max_model_len=256, spec_decode=drafter) as llm:
        drafted = llm.generate(["one", "another"], params)
    for one, other in zip(plain, drafted, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        metrics = other.outputs[0].metrics
        assert metrics is not None
        assert metrics.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "differing"),
    [
        (("--held-out-share", "0.2"), "held_out_share 0.3 there, 0.2 now"),
        (("--seed", "7"), "seed 0 there, 7 now"),
        (("--learning-rate", "0.5"), "learning_rate 0.008 there, 0.5 now"),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(
    arguments: tuple[str, ...],
    differing: str,
    copied: Path,
    tiny_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("eagle", copied, tiny_path, *arguments) == 2
    error = capsys.readouterr().err
    assert "other settings" in error
    assert differing in error


def test_too_little_data_is_an_error_that_says_what_to_do(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--num-tokens", "1", "--held-out-share", "0.0001")
    assert train("eagle", tmp_path, tiny_path, *arguments) == 2
    assert "0 greedy ones held out to measure on; generate more" in capsys.readouterr().err


def test_a_model_without_room_for_a_turn_is_refused(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eagle", tmp_path, tiny_path, "--max-model-len", "100") == 2
    assert "but max_model_len is 100; raise model.max_model_len" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["falcon", "out"], "invalid choice: 'falcon'"),
        (["eagle", "out", "--max-steps", "0"], "got '0', allowed: 1 or more"),
        (["eagle", "out", "--minutes", "nan"], "got 'nan', allowed: more than 0"),
        (["eagle", "out", "--held-out-share", "1"], "got '1', allowed: more than 0, less than 1"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-drafter", *arguments]) == 2
    assert message in capsys.readouterr().err
