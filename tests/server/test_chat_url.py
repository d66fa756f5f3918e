"""hotshoe chat --url: the same conversation, on a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import COMMAND, ENVIRONMENT, LETTER_IDS, hotshoe
from cli.terminal import Terminal
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from server.command import RunningServer, start_server

LETTERS = ["--allowed-token-ids", ",".join(map(str, LETTER_IDS))]
GREEDY = ["--temperature", "0", "--max-tokens", "12", *LETTERS]
CUT = "[the answer was cut off: max_tokens was reached]"


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose answers take many seconds, and that wants a key."""
    config = tiny_llama_config(max_position_embeddings=16384)
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "long", config)
    with start_server(str(path), "--max-num-seqs", "1", "--server.api-keys", "key") as running:
        yield running


def test_a_pipe_gets_the_answers_that_the_model_gives_without_a_server(
    server: RunningServer, tiny_path: Path
) -> None:
    lines = "\n".join(["hi", "why", "/reset", "why", "x" * 300, "so", "/exit", "never"])
    model = ["--model", str(tiny_path), "--dtype", "float32", "--max-model-len", "256"]
    flags = ["--system", "be brief", *GREEDY]
    here = hotshoe("chat", *model, *flags, stdin=lines)
    there = hotshoe("chat", "--url", server.url, *flags, stdin=lines)
    assert there.returncode == 0, there.stderr
    assert len(there.stdout.splitlines()) == 4
    assert there.stdout == here.stdout
    notes = [note for note in there.stderr.splitlines() if note != CUT]
    assert notes[0] == "[a new conversation]"
    assert notes[1].startswith("[the server answered 400: ")
    assert "context length is 256" in notes[1]
    assert len(notes) == 2


def test_a_full_context_names_the_remedy(server: RunningServer) -> None:
    done = hotshoe("chat", "--url", server.url, "--once", "hi", "--temperature", "0", *LETTERS)
    assert done.returncode == 0
    assert done.stderr == (
        "[the answer was cut off: the context is full; /reset starts a new conversation]\n"
    )


def test_ctrl_c_interrupts_the_answer_and_frees_the_server(long_server: RunningServer) -> None:
    command = [COMMAND, "chat", "--url", long_server.url, "--api-key", "key", *LETTERS]
    with Terminal([*command, "--temperature", "0"], ENVIRONMENT) as terminal:
        terminal.expect(r"/help lists the commands\.\r\n> ")
        for _ in range(2):
            # the server runs one request at a time: a second answer means that the first has ended
            terminal.type("hi\n")
            terminal.expect(r"hi\r\n[a-z]{20}")
            terminal.type("\x03")
            terminal.expect(r"\[interrupted\]\r\n> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_a_missing_key_is_asked_for(long_server: RunningServer) -> None:
    done = hotshoe("chat", "--url", long_server.url, "--once", "hi")
    assert done.returncode == 2
    assert "answered 401: " in done.stderr
    assert done.stderr.endswith("pass it with --api-key or $OPENAI_API_KEY\n")


def test_a_server_that_dies_in_mid_answer_is_told_of(
    long_server: RunningServer, tmp_path: Path
) -> None:
    command = [COMMAND, "chat", "--url", long_server.url, "--temperature", "0", *LETTERS]
    with Terminal(command, ENVIRONMENT | {"OPENAI_API_KEY": "key"}) as terminal:
        terminal.expect(r"> ")
        terminal.type("hi\n")
        terminal.expect(r"hi\r\n[a-z]{20}")
        long_server.process.kill()
        terminal.expect(r"\[can't reach http://\S+: the connection was closed in mid-response")
        terminal.type("hi\n")
        terminal.expect(r"\[can't reach http://")
        terminal.type("/exit\n")
        assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "can't reach http://127.0.0.1:1: "),
        (["--url", "localhost"], 2, "--url: got 'localhost', allowed: http://host:port"),
        (["--url", "http://x", "--max-model-len", "9"], 2, "--max-model-len: the server of --url"),
        (["--server-model", "x"], 2, "--server-model: names a model of a server"),
        (["--url", "URL", "--server-model", "x"], 2, "the server answered 404"),
        (["--url", "URL", "--structured-outputs.regex", "("], 2, "the server answered 400"),
    ],
)
def test_mistakes_end_it_with_one_line(
    server: RunningServer, flags: list[str], code: int, message: str
) -> None:
    flags = [server.url if flag == "URL" else flag for flag in flags]
    done = hotshoe("chat", "--once", "hi", *flags)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
