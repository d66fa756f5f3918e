import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hotshoe.testing.models import write_tiny_checkpoint

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
