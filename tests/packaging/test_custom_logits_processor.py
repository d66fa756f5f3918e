"""The example of a logits processor's package, as a stranger would use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_logits_processor"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(
    make_environment: Callable[..., Any],
    build: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """A virtual environment with the wheel of the example installed."""
    dist = tmp_path_factory.mktemp("dist")
    build(EXAMPLE, dist, "--wheel")
    (wheel,) = dist.glob("*.whl")
    environment = make_environment(sees_hotshoe=True)
    environment.install(wheel)
    return environment


def test_installed_plugin_shows_its_contract_and_options(environment: Any) -> None:
    name = "logits_processors/no_repeat_ngram"
    shown = json.loads(environment.hotshoe("plugins", "show", name, "--json").stdout)
    assert shown["contract"] == "logits_processor/0"
    assert [one["name"] for one in shown["options"]] == ["size", "include_prompt"]


def test_config_file_of_the_example_is_accepted_and_a_wrong_option_refused(
    environment: Any, tmp_path: Path
) -> None:
    checked = environment.hotshoe("config", "check", str(EXAMPLE / "engine.yaml"))
    assert checked.stdout.endswith("engine.yaml: ok\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((EXAMPLE / "engine.yaml").read_text().replace("size: 4", "size: -4"))
    refused = environment.hotshoe("config", "check", str(wrong), code=2)
    assert "options.size: got -4, allowed: " in refused.stderr


def test_test_suite_of_the_example_passes_where_it_is_installed(environment: Any) -> None:
    result = environment.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), str(EXAMPLE)
    )
    assert " passed" in result.stdout
