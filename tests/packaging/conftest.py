import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotshoe import LLM
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe.testing.plugins import make_distribution

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, which sees the packages of the running one."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, wheel: Path) -> None:
        """Install a wheel and nothing else: no dependency, no index."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
        options = ["--no-deps", "--no-index", "--ignore-installed", "--quiet", "--no-compile"]
        subprocess.run([*command, *options, str(wheel)], check=True, env=_clean_environ())

    def run(
        self, *arguments: str, cwd: Path | None = None, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ...`` in it and check the exit code."""
        result = subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd or self.folder,
            env=_clean_environ(),
            capture_output=True,
            text=True,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result

    def hotshoe(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``hotshoe ...`` in it."""
        return self.run("-m", "hotshoe.entrypoints.cli.main", *arguments, code=code)


def _clean_environ() -> Mapping[str, str]:
    """Without whatever would change where Python looks for packages, or hotshoe's settings."""
    dropped = ("PYTHON", "HOTSHOE_", "PIP_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Make a virtual environment; ``sees_hotshoe`` says whether the running one's development
    install of hotshoe can be imported in it.
    """

    def make(*, sees_hotshoe: bool) -> Environment:
        folder = tmp_path_factory.mktemp("environment") / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        lines = []
        for path in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
            # addsitedir follows the .pth file of a development install, a plain line doesn't
            lines.append(f"import site; site.addsitedir({path!r})" if sees_hotshoe else path)
        (own / "running_environment.pth").write_text("\n".join(lines) + "\n")
        return Environment(folder)

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def build_package(source: Path, target: Path, *flags: str) -> None:
    """Build distributions without downloading anything."""
    command = [sys.executable, "-m", "build", "--no-isolation", *flags, "--outdir", str(target)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def build() -> Callable[..., None]:
    return build_package


PLUGIN_SOURCES = Path(__file__).parent / "plugins_src"

ACME = {
    "schedulers": {"lifo": "acme_lifo"},
    "attention": {"naive": "acme_attention"},
    "samplers": {"runner_up": "acme_sampler"},
    "spec_decode": {"oracle": "acme_drafter"},
    "guided_decoding": {"choice": "acme_choice"},
    "models": {"toy": "acme_model"},
    "kernels": {"counting": "acme_kernels"},
    "quantization": {"acme_int8": "acme_int8"},
    "executors": {"threaded": "acme_executor"},
    "kv_eviction": {"mru": "acme_eviction", "random": "acme_random"},
    "logits_processors": {"ban": "acme_ban"},
}
"""By kind: name and module of each plugin that the distribution acme offers."""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Install acme outside of the repository; the fixture imports one of its modules."""
    modules = [name for names in ACME.values() for name in names.values()]
    make_distribution(
        tmp_path / "acme",
        "acme-plugins",
        "3.1",
        modules={name: (PLUGIN_SOURCES / f"{name}.py").read_text() for name in modules},
        entry_points={f"hotshoe.{kind}": names for kind, names in ACME.items()},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "acme"))
    yield importlib.import_module
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def open_llm(
    acme: Callable[[str], Any], tmp_path: Path, tiny_checkpoint: Path
) -> Iterator[Callable[..., LLM]]:
    """Open an ``LLM`` from a YAML file with these sections; the tiny model if none is named."""
    opened: list[LLM] = []

    def open_one(model: Any = None, **sections: Any) -> LLM:
        path = tmp_path / f"engine{len(opened)}.yaml"
        if model is None or isinstance(model, dict):
            model = {"path": str(tiny_checkpoint)} | (model or {})
        path.write_text(yaml.safe_dump({"model": model, **sections}))
        opened.append(LLM(config=str(path)))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()
