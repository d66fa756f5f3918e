"""The example of an attention backend's package, as a stranger would use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flash_attn_backend"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(
    make_environment: Callable[..., Any],
    build: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """A virtual environment with the wheel of the example installed, but not the library."""
    dist = tmp_path_factory.mktemp("dist")
    build(EXAMPLE, dist, "--wheel")
    (wheel,) = dist.glob("*.whl")
    environment = make_environment(sees_hotshoe=True)
    environment.install(wheel)
    return environment


def test_plugin_says_that_its_library_is_missing(environment: Any) -> None:
    shown = json.loads(
        environment.hotshoe("plugins", "show", "attention/flash_attn", "--json").stdout
    )
    assert shown["contract"] == "attention/0"
    assert shown["unsupported"] == ["the library is missing: pip install flash-attn"]
    refused = environment.hotshoe("config", "check", str(EXAMPLE / "engine.yaml"), code=2)
    assert "the library is missing: pip install flash-attn" in refused.stderr


def test_test_suite_of_the_example_passes_where_it_is_installed(environment: Any) -> None:
    result = environment.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), str(EXAMPLE)
    )
    assert " passed" in result.stdout
