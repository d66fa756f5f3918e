"""Servers that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from server.command import RunningServer, start_server

Post = Callable[..., Any]

LIMITS = ("--max-model-len", "256", "--max-num-seqs", "8", "--server.served-model-name", "tiny")


@pytest.fixture(scope="session")
def server(tiny_path: Path) -> Iterator[RunningServer]:
    """The tiny model, served as ``tiny``, with the development endpoints."""
    with start_server(str(tiny_path), *LIMITS, "--server.dev-endpoints") as running:
        yield running


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A client of it that raises nothing by itself."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def idle(http: httpx.Client) -> Iterator[None]:
    """Whatever a test does, all blocks are free soon after."""
    yield
    wait_until_idle(http)


def wait_until_idle(http: httpx.Client, timeout_s: float = 20.0) -> None:
    """Wait until no request is alive and every block is free."""
    deadline = monotonic() + timeout_s
    while True:
        load = http.get("/load").json()
        busy = load["num_running"] + load["num_waiting"]
        if not busy and load["num_free_blocks"] == load["num_blocks"]:
            return
        assert monotonic() < deadline, load
        sleep(0.02)
