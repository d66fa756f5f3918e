import sys
from pathlib import Path
from typing import Any

import pytest

from hotshoe.plugins import PluginInfo, inspect_in_subprocess
from hotshoe.testing.plugins import make_distribution

COMPLETE = '''
    """Serves the shortest job first."""

    from dataclasses import dataclass
    from typing import Literal

    from pydantic import Field

    from hotshoe.api import Component, PluginOptions, hookimpl

    print("noise")

    @dataclass(frozen=True)
    class Capabilities:
        devices: tuple[str, ...] = ("cpu",)
        names: frozenset[str] = frozenset({"b", "a"})

    class Options(PluginOptions):
        aging_s: float = Field(default=1.5, ge=0, description="Seconds until it's urgent.")
        mode: Literal["a", "b"]

    @hookimpl
    def hotshoe_component():
        print("more noise")
        return Component(
            contract="scheduler/0",
            factory=lambda options, context: None,
            options=Options,
            capabilities=Capabilities(),
            unsupported=("no such device",),
        )
'''


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def inspect_one(source: str, timeout_s: float = 60.0) -> dict[str, Any]:
        make_distribution(
            tmp_path,
            modules={"probed_acme": source},
            entry_points={"hotshoe.schedulers": {"acme": "probed_acme"}},
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        info = PluginInfo("schedulers", "acme", "acme", "1.0", "probed_acme")
        return inspect_in_subprocess(info, timeout_s=timeout_s)

    return inspect_one


def test_plugin_is_described_as_plain_data_without_being_imported_here(inspect: Any) -> None:
    result = inspect(COMPLETE)
    assert "probed_acme" not in sys.modules
    schema = result.pop("options_schema")
    assert result == {
        "status": "ok",
        "contract": "scheduler/0",
        "is_experimental": False,
        "doc": "Serves the shortest job first.",
        "options": [
            {
                "name": "aging_s",
                "type": "float",
                "required": False,
                "default": 1.5,
                "description": "Seconds until it's urgent.",
                "allowed": "a number >= 0",
            },
            {
                "name": "mode",
                "type": "Literal['a', 'b']",
                "required": True,
                "description": "",
                "allowed": "one of 'a', 'b'",
            },
        ],
        "capabilities": {"devices": ["cpu"], "names": ["a", "b"]},
        "unsupported": ["no such device"],
        "auto_priority": 0,
        "prepares": False,
    }
    assert schema["required"] == ["mode"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("", "describes no component"),
        (
            "import os; os.write(1, b'last words'); os._exit(7)",
            "ended the process while being imported, exit code 7; its last output:\nlast words",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "crashed while being imported, signal SIGSEGV",
        ),
    ],
)
def test_plugin_that_breaks_is_an_error_and_nothing_worse(
    inspect: Any, source: str, error: str
) -> None:
    result = inspect(source)
    assert result["status"] == "error"
    assert result["error"].startswith("scheduler plugin 'acme' (acme 1.0, module 'probed_acme') ")
    assert error in result["error"]


def test_plugin_that_hangs_is_killed_after_the_timeout(inspect: Any) -> None:
    result = inspect("import time\nwhile True: time.sleep(1)", timeout_s=0.5)
    assert result["status"] == "error"
    assert "did not finish within 0.5 s" in result["error"]


def test_thread_that_a_plugin_leaves_behind_holds_nobody_up(inspect: Any) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"
    result = inspect(thread + "1 / 0")
    assert "ZeroDivisionError" in result["error"]
