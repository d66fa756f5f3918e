"""``hotshoe serve`` from start to end: ports, signals, draining, deaths, several workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from cli.command import COMMAND, ENVIRONMENT
from server.command import RunningServer, start_server

pytestmark = pytest.mark.slow

NUM_LONG = 6000  # tokens that take seconds, so that much can happen meanwhile
LONG = {
    "model": "tiny",
    "prompt": "a",
    "max_tokens": NUM_LONG,
    "temperature": 0,
    "ignore_eos": True,
}
SHORT = LONG | {"max_tokens": 4}
FLAGS = ("--max-model-len", "8192", "--server.served-model-name", "tiny")


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            found += [child, *children(child)]
    return found


def command_of(pid: int) -> str:
    """What a process runs."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def core_of(server: RunningServer) -> int:
    """The engine core's process."""
    (core,) = [pid for pid in children(server.process.pid) if "core_process" in command_of(pid)]
    return core


def wait_until_gone(pids: list[int]) -> None:
    """Wait until none of the processes is left."""
    for _ in range(300):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.02)
    raise AssertionError(f"still there: {[pid for pid in pids if Path(f'/proc/{pid}').exists()]}")


class Streaming(threading.Thread):
    """A client that streams a long completion, and keeps what came."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.lines: list[str] = []
        self.has_begun = threading.Event()
        self.start()
        assert self.has_begun.wait(30)

    def run(self) -> None:
        body = LONG | {"stream": True}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.lines.append(line.removeprefix("data: "))
                    self.has_begun.set()

    @property
    def chunks(self) -> list[dict[str, object]]:
        """Everything that came, the end mark aside."""
        return [json.loads(line) for line in self.lines if line != "[DONE]"]


def test_a_port_in_use_is_an_error_before_anything_is_loaded(roomy_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = subprocess.run(
            [COMMAND, "serve", str(roomy_path), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            env=ENVIRONMENT,
            check=False,
        )
    assert result.returncode == 2
    assert f"server.port {port}: Address already in use" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "flags",
    [
        ("--server.tls-cert-file", "{file}", "--server.tls-key-file", "{file}"),
        ("--server.tls-cert-file", "{file}/no", "--server.tls-key-file", "{file}/no"),
        ("--server.api-key-file", "{file}/no"),
        ("--server.core-address", "tcp://127.0.0.1"),
        ("--server.core-address", "tcp://127.0.0.1:65535"),
        ("--server.core-address", "tcp://127.0.0.1:{taken}"),
    ],
)
def test_files_and_addresses_are_checked_before_anything_is_loaded(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    file = tmp_path / "some.pem"
    file.write_text("nothing")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [one.format(file=file, taken=port) for one in flags]
        result = subprocess.run(
            [COMMAND, "serve", "--port", "0", *given],
            capture_output=True,
            text=True,
            timeout=60,
            env=ENVIRONMENT,
            check=False,
        )
    assert result.returncode in (1, 2)
    assert flags[0].removeprefix("--").replace("-", "_") in result.stderr
    assert "Traceback" not in result.stderr
    assert "kv cache" not in result.stderr
    assert result.stdout == ""


def test_a_model_that_cannot_be_loaded_ends_the_command_with_one_message(tmp_path: Path) -> None:
    result = subprocess.run(
        [COMMAND, "serve", str(tmp_path / "nothing"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("no such file or folder") == 1
    assert "Traceback" not in result.stderr


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS) as server:
        processes = children(server.process.pid)
        stream = Streaming(server.url)
        server.process.send_signal(signal.SIGTERM)
        statuses = set()
        while stream.is_alive():
            try:
                statuses.add(httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code)
                statuses.add(httpx.get(f"{server.url}/ready").status_code)
            except httpx.TransportError:
                break
        stream.join()
        assert statuses <= {200, 503}
        assert 503 in statuses
        assert stream.lines[-1] == "[DONE]"
        assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert server.process.wait(20) == 0
        wait_until_gone(processes)


def test_a_second_sigterm_stops_at_once(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS) as server:
        processes = children(server.process.pid)
        stream = Streaming(server.url)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
        stream.join()
        assert len(stream.chunks) < NUM_LONG
        wait_until_gone(processes)


def test_a_killed_core_is_reported_to_clients_and_ends_the_server(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS) as server:
        processes = children(server.process.pid)
        stream = Streaming(server.url)
        os.kill(core_of(server), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while httpx.get(f"{server.url}/health").status_code != 503:
            assert time.monotonic() < deadline
        stream.join(20)
        assert not stream.is_alive()
        assert "error" in stream.chunks[-1]
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code == 503
        assert server.process.wait(20) == 1
        wait_until_gone(processes)


def test_nothing_outlives_a_server_that_is_killed(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS, "--workers", "2") as server:
        processes = children(server.process.pid)
        assert len(processes) == 3
        server.process.kill()
        server.process.wait()
        wait_until_gone(processes)


def test_several_workers_share_a_port_and_one_that_dies_is_replaced(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS, "--workers", "2") as server:
        before = children(server.process.pid)
        core = core_of(server)
        workers = [pid for pid in before if pid != core]
        assert len(workers) == 2
        texts = {
            httpx.post(f"{server.url}/v1/completions", json=SHORT).json()["choices"][0]["text"]
            for _ in range(6)
        }
        assert len(texts) == 1
        os.kill(workers[0], signal.SIGKILL)
        for _ in range(500):
            now = [pid for pid in children(server.process.pid) if pid != core]
            if len(now) == 2 and workers[0] not in now:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("the worker was not replaced")
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=30).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        wait_until_gone([*before, *now])


def test_ctrl_c_in_a_terminal_drains_all_workers(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS, "--workers", "2", is_group=True) as server:
        processes = children(server.process.pid)
        stream = Streaming(server.url)
        os.killpg(server.process.pid, signal.SIGINT)
        stream.join()
        assert stream.lines[-1] == "[DONE]"
        assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert server.process.wait(20) == 0
        wait_until_gone(processes)


def test_a_core_that_hangs_ends_a_server_of_several_workers(roomy_path: Path) -> None:
    with start_server(str(roomy_path), *FLAGS, "--workers", "2") as server:
        processes = children(server.process.pid)
        stream = Streaming(server.url)
        os.kill(core_of(server), signal.SIGSTOP)
        stream.join(10)
        assert not stream.is_alive()
        assert "error" in stream.chunks[-1]
        assert server.process.wait(30) == 1
        wait_until_gone(processes)
