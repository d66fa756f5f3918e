"""Requests made up from ``/openapi.json``, good and bad ones: none is a server error."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from server.command import RunningServer
from server.conftest import wait_until_idle

LEFT_OUT = ("/start_profile", "/stop_profile")
SLOW = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")


def operations(url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return [one for one in found if one.path not in LEFT_OUT]


def tamed(body: Any, mode: GenerationMode) -> Any:
    """A body that gets past the first check more often than chance would let it."""
    if mode is GenerationMode.POSITIVE and isinstance(body, dict):
        body.pop("model", None)
        for name in SLOW:
            if isinstance(body.get(name), int):
                body[name] = body[name] % 5 + (name == "n")
    return body


def check_all(url: str, mode: GenerationMode, num_examples: int) -> int:
    """Returns how many requests were made."""
    num_made = 0
    for operation in operations(url):
        has_body = operation.method.upper() == "POST"

        @settings(
            max_examples=num_examples if has_body else 3,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal num_made
            num_made += 1
            case.body = tamed(case.body, mode)
            response = case.call(timeout=60)
            case.validate_response(response, checks=[not_a_server_error])

        try:
            check()
        except Exception as error:
            if type(error).__name__ != "Unsatisfiable":
                raise
    return num_made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "num_examples", [15, pytest.param(200, marks=pytest.mark.full)], ids=["reduced", "full"]
)
def test_no_request_that_the_schema_suggests_is_a_server_error(
    server: RunningServer, http: httpx.Client, num_examples: int
) -> None:
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    num_made = sum(check_all(server.url, mode, num_examples) for mode in modes)
    assert num_made >= num_examples * 10
    wait_until_idle(http, 60)
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
