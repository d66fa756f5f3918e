"""The example of a plugin package, as a stranger would use it: built, installed, selected, run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_scheduler"

pytestmark = pytest.mark.slow

GENERATE = """
import json, sys
from hotshoe import LLM, SamplingParams

with LLM(config=sys.argv[1]) as llm:
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 3)]
    finished = []
    llm.on_finish(lambda request: finished.append(request.num_output_tokens))
    outputs = llm.generate(["a long story", "a word"], greedy)
    token_ids = [output.outputs[0].token_ids for output in outputs]
    print(json.dumps([llm.components["scheduler"], finished, token_ids]))
"""


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


@pytest.fixture
def config(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Write a config file that selects the scheduler."""

    def write(name: str = "sjf", **options: Any) -> Path:
        scheduler = {"name": name, "options": options, "max_num_seqs": 1}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"model": str(tiny_checkpoint), "scheduler": scheduler}))
        return path

    return write


def test_installed_plugin_is_listed_with_distribution_and_version(environment: Any) -> None:
    listed = json.loads(environment.hotshoe("plugins", "list", "schedulers", "--json").stdout)
    expected = {
        "kind": "schedulers",
        "name": "sjf",
        "distribution": "hotshoe-sjf",
        "version": "0.1.0",
    }
    assert expected in listed
    assert {one["name"] for one in listed} >= {"fcfs", "priority", "sjf"}


def test_installed_plugin_can_be_loaded_and_shows_its_options(environment: Any) -> None:
    shown = json.loads(environment.hotshoe("plugins", "show", "schedulers/sjf", "--json").stdout)
    assert shown["contract"] == "scheduler/0"
    assert [one["name"] for one in shown["options"]] == ["aging"]
    assert shown["options"][0]["default"] == 100.0


def test_config_file_of_the_example_is_accepted(environment: Any) -> None:
    checked = environment.hotshoe("config", "check", str(EXAMPLE / "engine.yaml"))
    assert checked.stdout.endswith("engine.yaml: ok\n")


def test_misspelt_option_is_refused_with_its_path(
    environment: Any, config: Callable[..., Path]
) -> None:
    path = config(ageing=3.0)
    refused = environment.hotshoe("config", "check", str(path), code=2)
    assert (
        "scheduler.options.ageing: unknown option; options of this plugin: aging "
        f"(did you mean 'aging'?) (scheduler.options from file {path})" in refused.stderr
    )


@pytest.mark.parametrize("aging", [-1.0, "much", float("inf")])
def test_wrong_option_is_refused_with_what_is_allowed(
    environment: Any, config: Callable[..., Path], aging: Any
) -> None:
    refused = environment.hotshoe("config", "check", str(config(aging=aging)), code=2)
    assert f"scheduler.options.aging: got {aging!r}, allowed: a number" in refused.stderr


def test_misspelt_name_is_refused_with_the_closest_one(
    environment: Any, config: Callable[..., Path]
) -> None:
    refused = environment.hotshoe("config", "check", str(config("sjff")), code=2)
    assert "no scheduler plugin named 'sjff'" in refused.stderr
    assert "sjf (hotshoe-sjf 0.1.0)" in refused.stderr
    assert "(did you mean 'sjf'?)" in refused.stderr


def test_safe_mode_refuses_the_plugin(environment: Any, config: Callable[..., Path]) -> None:
    path = str(config(aging=1.0))
    refused = environment.hotshoe("config", "check", path, "--plugins.safe-mode", "true", code=2)
    assert "scheduler plugin 'sjf' (hotshoe-sjf 0.1.0" in refused.stderr
    assert "safe mode uses hotshoe's own plugins only" in refused.stderr


def test_plugin_selected_by_name_serves_the_shortest_request_first(
    environment: Any, config: Callable[..., Path]
) -> None:
    mine = json.loads(environment.run("-c", GENERATE, str(config(aging=0.0))).stdout)
    theirs = json.loads(environment.run("-c", GENERATE, str(config("fcfs"))).stdout)
    assert mine[:2] == ["sjf (hotshoe-sjf 0.1.0)", [3, 24]]
    assert theirs[0].startswith("fcfs (hotshoe ")
    assert theirs[1] == [24, 3]
    assert mine[2] == theirs[2]


def test_test_suite_of_the_example_passes_where_it_is_installed(environment: Any) -> None:
    result = environment.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), str(EXAMPLE)
    )
    assert " passed" in result.stdout
