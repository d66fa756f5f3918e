"""hotshoe run-batch: with an engine of its own, and against a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.command import COMMAND, ENVIRONMENT, hotshoe
from hotshoe.entrypoints.batch import run_batch
from hotshoe.errors import ConfigError
from hotshoe.http_client import Answer
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from server.command import RunningServer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 3, "temperature": 0, "n": 2}

BAD_LINES = {
    "nonsense": "line 1 is no JSON: ",
    '{"custom_id": "x"': "line 1 is no JSON: ",
    "[1]": "allowed: an object with custom_id, method, url and body",
    '{"custom_id": 7}': "custom_id: got 7, allowed: a text that is not empty",
    '{"custom_id": "x", "method": "GET"}': "method: got 'GET', allowed: 'POST'",
    '{"custom_id": "x", "url": "/v1/models"}': "url: got '/v1/models', allowed: ",
    '{"custom_id": "x", "url": "/v1/completions"}': "body: got None, allowed: an object",
    '{"custom_id": "x", "url": "/v1/completions", "body": {"stream": true}}': "body.stream: got",
    "\udcff": "line 1 is no JSON: ",
}


def line(custom_id: str, body: Any, url: str = "/v1/completions") -> str:
    entry = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(entry) + "\n"


def read(path: Path) -> dict[str | None, Any]:
    """Entries by custom id."""
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


class Scripted:
    """Answers each prompt with what is planned for it, once more each time; then with 200."""

    def __init__(self, plan: dict[str, list[Any]] | None = None) -> None:
        self.plan = plan or {}
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        prompt = body["prompt"]
        self.asked.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        planned = self.plan.get(prompt, [])
        found = planned.pop(0) if planned else 200
        if isinstance(found, BaseException):
            raise found
        return Answer(found, {"retry-after": "0"}, json.dumps({"id": f"of {prompt}"}).encode())


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    yield source, target
    assert {path.name for path in tmp_path.iterdir()} <= {
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.partial",
    }


@pytest.fixture
def long_batch(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model that can write for many seconds."""
    config = tiny_llama_config(max_position_embeddings=16384)
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "long", config)
    return ["--model", str(path), "--dtype", "float32", "--max-concurrency", "2"]


def run(sender: Scripted, files: tuple[Path, Path], max_concurrency: int = 4) -> tuple[int, ...]:
    counts = asyncio.run(run_batch(sender, *files, max_concurrency=max_concurrency))
    return counts.num_succeeded, counts.num_failed, counts.num_kept


def test_a_batch_runs_on_an_engine_of_its_own(tiny_path: Path, files: tuple[Path, Path]) -> None:
    source, target = files
    model = str(tiny_path)
    chat = line("chat", CHAT, "/v1/chat/completions")
    bad = line("refused", {"prompt": "hi", "max_tokens": -1})
    source.write_text(chat + "nonsense\n\n" + line("text", TEXT | {"model": model}) + bad)
    done = hotshoe(
        "run-batch", "-i", str(source), "-o", str(target), "--model", model, "--dtype", "float32"
    )
    assert done.returncode == 1
    assert done.stderr == f"2 answered, 2 failed: {target}\n"
    entries = read(target)
    assert entries.keys() == {"chat", "text", "refused", None}
    answer = entries["chat"]["response"]
    assert answer["status_code"] == 200
    assert answer["request_id"]
    assert answer["body"]["object"] == "chat.completion"
    assert answer["body"]["usage"]["completion_tokens"] == 4
    assert len(entries["text"]["response"]["body"]["choices"]) == 2
    assert entries["refused"]["response"]["status_code"] == 400
    assert entries["refused"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert entries["refused"]["error"] is None
    assert entries[None]["error"]["message"].startswith("line 2 is no JSON")
    assert entries[None]["response"] is None
    assert len({entry["id"] for entry in entries.values()}) == 4


def test_a_batch_runs_against_a_server(server: RunningServer, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text("".join(line(str(number), TEXT) for number in range(30)))
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--url", server.url + "/v1"]
    done = hotshoe(*arguments)
    assert (done.returncode, done.stderr) == (0, f"30 answered, 0 failed: {target}\n")
    texts = [
        choice["text"]
        for entry in read(target).values()
        for choice in entry["response"]["body"]["choices"]
    ]
    assert len(texts) == 60
    assert len(set(texts)) == 1
    before = target.read_bytes()
    source.write_text(source.read_text() + line("new", TEXT))
    done = hotshoe(*arguments)
    assert done.stderr == f"1 answered, 0 failed, 30 kept from before: {target}\n"
    assert target.read_bytes().startswith(before)
    assert read(target).keys() == {*map(str, range(30)), "new"}


@pytest.mark.parametrize(("bad", "message"), BAD_LINES.items())
def test_a_line_that_is_no_request_becomes_an_error(
    files: tuple[Path, Path], bad: str, message: str
) -> None:
    source, target = files
    source.write_text(bad + "\n" + line("good", {"prompt": "p"}), errors="surrogateescape")
    assert run(Scripted(), files) == (1, 1, 0)
    entries = read(target)
    assert entries.pop("good")["response"]["body"] == {"id": "of p"}
    ((custom_id, entry),) = entries.items()
    assert custom_id in ("x", None)
    assert entry["response"] is None
    assert message in entry["error"]["message"]


def test_a_second_line_with_the_same_custom_id_is_an_error(files: tuple[Path, Path]) -> None:
    files[0].write_text(line("a", {"prompt": "1"}) + line("a", {"prompt": "2"}))
    sender = Scripted()
    assert run(sender, files) == (1, 1, 0)
    assert sender.asked == ["1"]
    assert "line 2: custom_id 'a' is that of line 1 already" in files[1].read_text()


def test_an_interrupted_batch_goes_on_where_it_was(files: tuple[Path, Path]) -> None:
    source, target = files
    partial = target.with_name("out.jsonl.partial")
    source.write_text("".join(line(one, {"prompt": one}) for one in "abcdef"))
    with pytest.raises(RuntimeError, match="power cut"):
        run(Scripted({"d": [RuntimeError("power cut")]}), files, max_concurrency=1)
    assert not target.exists()
    assert read(partial).keys() == set("abc")
    with partial.open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "d", "response": {"status_code": 2')
    sender = Scripted()
    assert run(sender, files) == (3, 0, 3)
    assert sorted(sender.asked) == list("def")
    assert read(target).keys() == set("abcdef")
    assert not partial.exists()


def test_what_failed_for_want_of_a_server_is_sent_again_by_the_next_run(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotshoe.entrypoints.batch._LONGEST_WAIT_S", 0.0)
    files[0].write_text("bad\n" + "".join(line(one, {"prompt": one}) for one in "abc"))
    gone = [ConnectionResetError("gone") for _ in range(9)]
    sender = Scripted({"a": [400], "b": [500], "c": [*gone]})
    assert run(sender, files) == (0, 4, 0)
    assert read(files[1])["c"]["error"] == {"code": "connection_error", "message": "gone"}
    assert read(files[1])["b"]["response"]["status_code"] == 500
    # the 400 is an answer; the bad line is still bad, and stands there once
    assert run(sender, files) == (2, 1, 1)
    assert len(files[1].read_text().splitlines()) == 4
    assert [read(files[1])[one]["response"]["status_code"] for one in "abc"] == [400, 200, 200]


def test_a_busy_server_is_asked_again(files: tuple[Path, Path]) -> None:
    files[0].write_text(line("a", {"prompt": "p"}))
    sender = Scripted({"p": [429, 503, 429]})
    assert run(sender, files) == (1, 0, 0)
    assert sender.asked == ["p"] * 4


def test_no_more_requests_are_under_way_than_allowed(files: tuple[Path, Path]) -> None:
    files[0].write_text("".join(line(str(number), {"prompt": "p"}) for number in range(50)))
    sender = Scripted()
    assert run(sender, files, max_concurrency=7) == (50, 0, 0)
    assert sender.most_at_once == 7


def test_ids_that_are_no_text_for_a_file_survive(files: tuple[Path, Path]) -> None:
    files[0].write_text(line("\ud800é", {"prompt": "p"}))
    assert run(Scripted(), files) == (1, 0, 0)
    assert run(Scripted(), files) == (0, 0, 1)
    assert read(files[1]).keys() == {"\ud800é"}


def test_an_output_that_cant_be_written_is_refused(files: tuple[Path, Path]) -> None:
    files[0].write_text(line("a", {"prompt": "p"}))
    with pytest.raises(ConfigError, match="can't write '/nowhere/out'"):
        run(Scripted(), (files[0], Path("/nowhere/out")))


def test_mistakes_are_named_together(files: tuple[Path, Path]) -> None:
    done = hotshoe("run-batch", "-i", "no-file", "-o", "no-file", "--max-concurrency", "0")
    assert done.returncode == 2
    for part in ("--max-concurrency: got 0", "'no-file' is no file", "is the input file"):
        assert part in done.stderr


def test_engine_flags_and_a_server_exclude_each_other(
    server: RunningServer, files: tuple[Path, Path]
) -> None:
    files[0].write_text(line("a", TEXT))
    flags = ["-i", str(files[0]), "-o", str(files[1]), "--url", server.url]
    done = hotshoe("run-batch", *flags, "--max-num-seqs", "3")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --max-num-seqs: the server of --url has its own engine; drop either\n"
    )


def test_a_batch_whose_engine_dies_ends_and_can_be_continued(
    files: tuple[Path, Path], long_batch: list[str]
) -> None:
    source, target = files
    short, long = ({"prompt": "hi", "max_tokens": count, "ignore_eos": True} for count in (1, 9999))
    source.write_text(line("short", short) + line("long", long))
    command = [COMMAND, "run-batch", "-i", str(source), "-o", str(target), *long_batch]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    with process.stderr:
        partial = target.with_name("out.jsonl.partial")
        while not partial.exists() or b"short" not in partial.read_bytes():
            assert process.poll() is None
            time.sleep(0.05)
        (core,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(core), signal.SIGKILL)
        assert process.wait(30) == 1
        assert "error: the engine core ended with code -9\n" in process.stderr.read()
    assert not target.exists()
    source.write_text(line("short", short) + line("long", short))
    done = hotshoe(*command[1:])
    assert done.stderr == f"1 answered, 0 failed, 1 kept from before: {target}\n"
    assert read(target).keys() == {"short", "long"}
