"""hotshoe bench serve against a real server."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli.command import COMMAND, ENVIRONMENT
from cli.terminal import Terminal
from hotshoe.entrypoints.cli.main import main
from server.command import RunningServer

Spread = dict.fromkeys(("mean", "median", "p50", "p90", "p95", "p99"), float)
SUMMARY: dict[str, Any] = {
    "duration_s": float,
    "num_requests": int,
    "num_succeeded": int,
    "num_failed": int,
    "errors": dict,
    "finish_reasons": dict,
    "num_prompt_tokens": int,
    "num_cached_tokens": int,
    "num_output_tokens": int,
    "requests_per_s": float,
    "output_tokens_per_s": float,
    "total_tokens_per_s": float,
    "max_concurrency": int,
    "max_send_delay_s": float,
    "ttft_ms": Spread,
    "tpot_ms": Spread,
    "itl_ms": Spread,
    "e2e_ms": Spread,
}
RESULT: dict[str, Any] = {
    "command": str,
    "dataset": dict,
    "time": str,
    "url": str,
    "endpoint": str,
    "model": str,
    "load": dict,
    "versions": dict,
    "client_system": str,
    "server_info": dict,
    "summary": SUMMARY,
}


def assert_shape(value: Any, shape: Any) -> None:
    """Exactly these keys, all the way down, with values of these types."""
    if isinstance(shape, dict):
        assert value.keys() == shape.keys()
        for key, inner in shape.items():
            assert_shape(value[key], inner)
    else:
        assert type(value) is shape


@pytest.fixture
def bench(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command and returns its result."""

    def run(*arguments: str, code: int = 0) -> Any:
        assert main(["bench", "serve", "--url", server.url, "--json", *arguments]) == code
        return json.loads(capsys.readouterr().out)

    return run


def test_the_result_says_what_was_sent_where_and_how_it_went(
    bench: Any, server: RunningServer, tiny_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    # short answers may all arrive in one piece, and then there is no time between two tokens
    result = bench(
        *("--num-prompts", "12", "--input-len", "4:9", "--output-len", "50:70"),
        *("--tokenizer", str(tiny_path), "--max-concurrency", "3", "--seed", "5"),
        *("--output", str(path)),
    )
    assert json.loads(path.read_text()) == result
    assert_shape(result, RESULT)
    assert result["command"].startswith(f"hotshoe bench serve --url {server.url} --json")
    assert result["dataset"] == {
        "name": "random",
        "seed": 5,
        "tokenizer": str(tiny_path),
        "num_prompts": 12,
        "input_len": [4, 9],
        "output_len": [50, 70],
    }
    assert (result["endpoint"], result["model"]) == ("completions", "tiny")
    assert result["server_info"]["components"]["scheduler"].startswith("fcfs")
    assert result["versions"].keys() >= {"python", "hotshoe"}
    summary = result["summary"]
    assert summary["num_succeeded"] == summary["num_requests"] == 12
    assert summary["finish_reasons"] == {"length": 12}
    assert 12 * 4 <= summary["num_prompt_tokens"] <= 12 * 9
    assert 12 * 50 <= summary["num_output_tokens"] <= 12 * 70
    assert summary["max_concurrency"] == 3


def test_requests_can_be_saved_and_are_the_same_with_the_same_seed(bench: Any) -> None:
    flags = ["--num-prompts", "6", "--input-len", "2:9", "--output-len", "3", "--save-requests"]
    flags += ["--request-rate", "200", "--goodput", "ttft:60000", "tpot:60000"]
    one, again, other = (bench(*flags, "--seed", seed) for seed in ("1", "1", "2"))

    def sent(result: Any) -> list[Any]:
        return [(one["planned_s"], one["num_prompt_tokens"]) for one in result["requests"]]

    assert sent(one) == sent(again) != sent(other)
    assert all(len(record["token_times_s"]) <= 3 for record in one["requests"])
    assert all(record["sent_s"] >= record["planned_s"] for record in one["requests"])
    assert one["summary"]["goodput"]["num_good"] == 6
    assert one["summary"]["goodput"]["share"] == 1.0


def test_shared_prefixes_are_served_from_the_cache(bench: Any, tiny_path: Path) -> None:
    result = bench(
        *("--dataset", "prefix", "--num-prompts", "8", "--num-prefixes", "2"),
        *("--prefix-len", "64", "--input-len", "4", "--output-len", "1"),
        *("--tokenizer", str(tiny_path), "--max-concurrency", "1"),
    )
    summary = result["summary"]
    assert summary["num_prompt_tokens"] == 8 * 68
    assert summary["num_cached_tokens"] == 6 * 64
    assert summary["tpot_ms"]["median"] is None


def test_conversations_go_turn_by_turn_and_carry_the_answers(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"turns": ["hi", "and?", "so?"]},
        {"prompt": "why"},
        {"messages": [{"role": "system", "content": "be brief"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = bench(
        *("--dataset", "jsonl", "--dataset-path", str(path), "--output-len", "4"),
        *("--save-requests", "--extra-body", '{"allowed_token_ids": [97]}'),
    )
    assert result["endpoint"] == "chat"
    assert result["load"]["fields"]["allowed_token_ids"] == [97]
    first = [one for one in result["requests"] if one["user"] == 0]
    assert [one["turn"] for one in first] == [0, 1, 2]
    # each turn repeats what was said, and waits for the answer before it
    lengths = [one["num_prompt_tokens"] for one in first]
    assert lengths[1] > lengths[0] + 4
    assert lengths[2] > lengths[1] + 4
    assert all(later["sent_s"] >= earlier["end_s"] for earlier, later in pairwise(first))
    assert result["summary"]["num_output_tokens"] == 5 * 4


def test_a_trace_is_sent_at_its_times_with_its_lengths(
    bench: Any, tiny_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.0000000,100,50\n"
        "2024-05-10 00:00:03.0000000,40,20\n"
        "2024-05-10 00:00:03.5000000,4000,20\n"
    )
    result = bench(
        *("--dataset", "trace", "--dataset-path", str(path), "--time-scale", "0.1"),
        *("--length-scale", "0.1", "--max-total-len", "100", "--tokenizer", str(tiny_path)),
        "--save-requests",
    )
    assert result["dataset"]["num_left_out"] == 1
    assert [one["planned_s"] for one in result["requests"]] == pytest.approx([0, 0.3])
    assert [one["num_prompt_tokens"] for one in result["requests"]] == [10, 4]
    assert [one["num_output_tokens"] for one in result["requests"]] == [5, 2]


def test_failures_are_counted_by_kind_and_the_others_go_on(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "x" * 300}, {"turns": ["y" * 300, "never"]}, {"prompt": "fine"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--dataset", "jsonl", "--dataset-path", str(path), "--output-len", "3"]
    assert main(["bench", "serve", "--url", server.url, *argv]) == 0
    shown = capsys.readouterr().out
    assert "failed: http_400                    2" in shown
    assert "failed: skipped                     1" in shown
    assert "http_400, for example: " in shown
    assert "context length is 256" in shown
    assert "requests succeeded                  1" in shown


def test_every_request_failing_is_exit_code_1(bench: Any) -> None:
    result = bench("--num-prompts", "2", "--input-len", "300", "--output-len", "1", code=1)
    assert result["summary"]["errors"] == {"http_400": 2}
    assert result["summary"]["ttft_ms"]["p99"] is None


def test_a_deadline_cuts_requests_off(bench: Any, http: Any, idle: None) -> None:
    result = bench(
        *("--num-prompts", "2", "--input-len", "1", "--output-len", "200"),
        *("--num-warmups", "0", "--timeout-s", "0.001"),
        code=1,
    )
    assert result["summary"]["errors"] == {"timeout": 2}


def test_a_terminal_sees_progress_and_a_table(server: RunningServer) -> None:
    flags = ["--num-prompts", "4", "--input-len", "3", "--output-len", "2"]
    command = [COMMAND, "bench", "serve", "--url", server.url, *flags]
    with Terminal(command, ENVIRONMENT) as terminal:
        terminal.expect(r"100%\|[^|]*\| 4/4")
        terminal.expect(r"requests succeeded +4\r\n")
        terminal.expect(r"TTFT +[0-9.]+ +[0-9.]+")
        assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "127.0.0.1:1"], "allowed: http://host:port or https://host:port"),
        (["--url", "http://127.0.0.1:1"], "can't reach http://127.0.0.1:1: "),
        (["--model", "other"], "a warm-up request to http://"),
        (["--dataset", "trace"], "--dataset-path: the trace dataset needs a file"),
        (["--dataset-path", "x"], "--dataset-path: the random dataset has no use for it"),
        (["--dataset", "jsonl", "--dataset-path", "/nowhere"], "can't read the prompts"),
        (["--sample", "--dataset", "jsonl", "--dataset-path", "x"], "needs --num-prompts"),
        (["--dataset", "prefix", "--num-prompts", "9"], "allowed: a multiple of --num-prefixes"),
        (["--goodput", "itl:5"], "got 'itl:5', allowed: NAME:MS with NAME of ttft, tpot, e2e"),
        (["--goodput", "ttft:soon"], "got 'ttft:soon'"),
        (["--extra-body", "[1]"], "got '[1]', allowed: a JSON object"),
        (["--input-len", "9:3"], "allowed: MIN:MAX with MIN <= MAX"),
        (["--request-rate", "0"], "got '0', allowed: more than 0"),
        (["--num-prompt", "3"], "unrecognized arguments: --num-prompt 3"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    server: RunningServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = [] if "--url" in arguments else ["--url", server.url]
    assert main(["bench", "serve", *url, *arguments]) in (1, 2)
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert message in shown


def test_a_key_is_sent_and_kept_out_of_the_result(bench: Any) -> None:
    flags = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1"]
    for key in (["--api-key", "secret-1"], ["--api-key=secret-2"]):
        result = bench(*flags, *key)
        assert "secret" not in json.dumps(result)
