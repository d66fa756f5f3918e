"""hotshoe's own wheel and sdist: complete, and working where nothing of the repository is seen."""

import json
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

GENERATE = """
import json, sys
import hotshoe
from hotshoe import LLM, SamplingParams

with LLM(sys.argv[1]) as llm:
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    print(json.dumps([hotshoe.__file__, llm.components, output.outputs[0].token_ids]))
"""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def dist(build: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(REPOSITORY, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(make_environment: Callable[..., Any], wheel: Path) -> Any:
    environment = make_environment(sees_hotshoe=False)
    environment.install(wheel)
    return environment


def source_files(project: dict[str, Any]) -> set[str]:
    """Every file of the packages that are shipped, by its path inside the wheel."""
    found = set()
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        folder = REPOSITORY / package
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(path.relative_to(folder.parent).as_posix())
    return found


def test_wheel_has_every_source_file_and_nothing_else(wheel: Path, project: dict[str, Any]) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == source_files(project)


def test_every_package_folder_of_the_repository_is_shipped(project: dict[str, Any]) -> None:
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    in_plugins = {
        path.parent.relative_to(REPOSITORY).as_posix()
        for path in REPOSITORY.glob("plugins/*/*/__init__.py")
    }
    assert packages == in_plugins | {"framework/hotshoe"}


def test_wheel_names_every_entry_point_and_the_command(
    wheel: Path, project: dict[str, Any]
) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/entry_points.txt")]
    text = archive.read(name).decode()
    assert "hotshoe = hotshoe.entrypoints.cli.main:main" in text
    for group, entries in project["project"]["entry-points"].items():
        assert f"[{group}]" in text
        for key, module in entries.items():
            assert f"{key} = {module}" in text


def test_sdist_has_sources_tests_and_documentation(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert {"framework/hotshoe/api/__init__.py", "tests/packaging/test_distribution.py"} <= names
    assert "docs/reference/config.md" in names
    assert "examples/custom_scheduler/pyproject.toml" in names


def test_installed_command_prints_help_and_lists_every_builtin(
    environment: Any, project: dict[str, Any]
) -> None:
    command = str(environment.folder / "bin" / "hotshoe")
    assert "usage: hotshoe" in environment.run(command, "--help").stdout
    listed = json.loads(environment.run(command, "plugins", "list", "--check", "--json").stdout)
    names = {(f"hotshoe.{one['kind']}", one["name"]) for one in listed}
    groups = project["project"]["entry-points"]
    assert names == {(group, key) for group, entries in groups.items() for key in entries}
    assert {one["distribution"] for one in listed} == {"hotshoe"}


def test_installed_wheel_generates_without_the_repository(
    environment: Any, tiny_checkpoint: Path
) -> None:
    result = environment.run("-W", "error", "-c", GENERATE, str(tiny_checkpoint))
    path, components, token_ids = json.loads(result.stdout)
    assert Path(path).is_relative_to(environment.folder)
    assert components["model"].startswith("llama (hotshoe ")
    assert len(token_ids) == 8
