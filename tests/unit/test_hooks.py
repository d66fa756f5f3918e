import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotshoe.api import FinishedRequest, StepRecord, hooks
from hotshoe.plugins import PluginRegistry
from hotshoe.testing.plugins import make_distribution

RECORDER = """
    from hotshoe.api import Component, hookimpl

    calls = []

    @hookimpl
    def hotshoe_component():
        calls.append(("hotshoe_component", None))
        return Component(contract="scheduler/0", factory=lambda options, context: None)

    @hookimpl
    def hotshoe_engine_started(components):
        calls.append(("hotshoe_engine_started", components))

    @hookimpl
    def hotshoe_step_committed(record):
        calls.append(("hotshoe_step_committed", record))

    @hookimpl
    def hotshoe_request_finished(request):
        calls.append(("hotshoe_request_finished", request))
"""

QUIET = """
    from hotshoe.api import Component, hookimpl

    @hookimpl
    def hotshoe_component():
        return Component(contract="scheduler/0", factory=lambda options, context: None)
"""

STEP = StepRecord(
    step_id=1,
    time_s=0.5,
    request_ids=["a"],
    num_scheduled_tokens=[3],
    num_prefill_tokens=3,
    num_decode_tokens=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_new_tokens=1,
    num_running=1,
    num_waiting=0,
    num_preempted=0,
    num_free_blocks=7,
    num_blocks=8,
    timings_s={"plan": 0.001},
)
FINISHED = FinishedRequest(
    request_id="a",
    finish_reason="stop",
    num_prompt_tokens=3,
    num_output_tokens=1,
    num_cached_tokens=0,
    num_preemptions=0,
    arrival_time_s=0.0,
    first_token_time_s=0.5,
    last_token_time_s=0.5,
    finish_time_s=0.5,
)

# how each hook is reached, and what it's given; the component hook is reached by loading alone
OBSERVATIONS: dict[str, tuple[Callable[[PluginRegistry], None], Any]] = {
    "hotshoe_engine_started": (
        lambda registry: registry.notify_started({"scheduler": "acme"}),
        {"scheduler": "acme"},
    ),
    "hotshoe_step_committed": (lambda registry: registry.notify_step(STEP), STEP),
    "hotshoe_request_finished": (lambda registry: registry.notify_finished(FINISHED), FINISHED),
}


def hookspecs() -> dict[str, Any]:
    attribute = hooks.PROJECT + "_spec"
    return {name: one for name, one in vars(hooks).items() if hasattr(one, attribute)}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Install schedulers by name and source, load them into one registry."""

    def load_all(**sources: str) -> PluginRegistry:
        make_distribution(
            tmp_path,
            modules={f"observing_{name}": source for name, source in sources.items()},
            entry_points={"hotshoe.schedulers": {name: f"observing_{name}" for name in sources}},
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        registry = PluginRegistry()
        for name in sources:
            registry.load("schedulers", name)
        return registry

    yield load_all
    for name in [name for name in sys.modules if name.startswith("observing_")]:
        del sys.modules[name]


def test_every_hook_is_tested_here() -> None:
    assert hookspecs().keys() == {"hotshoe_component", *OBSERVATIONS}


@pytest.mark.parametrize("name", hookspecs())
def test_every_hook_says_when_it_is_called_where_and_what_its_arguments_mean(name: str) -> None:
    hook = hookspecs()[name]
    doc = inspect.getdoc(hook) or ""
    assert "Called " in doc
    assert "process" in doc
    assert "Raises:" in doc
    arguments = inspect.signature(hook).parameters
    assert ("Args:" in doc) == bool(arguments)
    assert all(f"{argument}:" in doc for argument in arguments)


def test_component_hook_is_called_once_and_of_the_selected_module_alone(
    load: Callable[..., PluginRegistry],
) -> None:
    registry = load(one=RECORDER, two=RECORDER)
    registry.load("schedulers", "one")
    assert sys.modules["observing_one"].calls == [("hotshoe_component", None)]
    assert sys.modules["observing_two"].calls == [("hotshoe_component", None)]


@pytest.mark.parametrize("hook", OBSERVATIONS)
def test_observer_hook_reaches_every_loaded_module_with_its_arguments(
    load: Callable[..., PluginRegistry], hook: str
) -> None:
    notify, argument = OBSERVATIONS[hook]
    registry = load(one=RECORDER, quiet=QUIET, two=RECORDER)
    assert registry.is_observed(hook)
    notify(registry)
    for module in ("observing_one", "observing_two"):
        assert sys.modules[module].calls[1:] == [(hook, argument)]


@pytest.mark.parametrize("hook", OBSERVATIONS)
def test_observer_hook_that_nobody_implements_is_not_called(
    load: Callable[..., PluginRegistry], hook: str
) -> None:
    registry = load(quiet=QUIET)
    assert not registry.is_observed(hook)
    OBSERVATIONS[hook][0](registry)


@pytest.mark.parametrize("hook", OBSERVATIONS)
def test_failing_observer_is_logged_once_and_stops_nobody(
    load: Callable[..., PluginRegistry], hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    notify, argument = OBSERVATIONS[hook]
    failing = RECORDER.replace(f'calls.append(("{hook}"', f'1 / 0, calls.append(("{hook}"')
    registry = load(before=RECORDER, failing=failing, after=RECORDER)
    with caplog.at_level(logging.ERROR, logger="hotshoe.plugins"):
        notify(registry)
        notify(registry)
    for module in ("observing_before", "observing_after"):
        assert sys.modules[module].calls[1:] == [(hook, argument)] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{hook} of plugin schedulers/failing failed")
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_observer_may_take_fewer_arguments_than_the_hook_has(
    load: Callable[..., PluginRegistry],
) -> None:
    fewer = RECORDER.replace("hotshoe_step_committed(record)", "hotshoe_step_committed()").replace(
        '"hotshoe_step_committed", record', '"hotshoe_step_committed", "none"'
    )
    registry = load(one=fewer)
    registry.notify_step(STEP)
    assert sys.modules["observing_one"].calls[1:] == [("hotshoe_step_committed", "none")]
