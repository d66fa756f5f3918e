"""Loads: traces, datasets, arrivals, and the figures made of what became of each request."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from hotshoe.bench.datasets import (
    PlannedRequest,
    file_requests,
    prefix_requests,
    random_requests,
    trace_requests,
)
from hotshoe.bench.load import LoadSettings, RequestRecord, arrival_times
from hotshoe.bench.prompts import TokenSource, WordSource
from hotshoe.bench.serving_metrics import spread, summarise
from hotshoe.bench.traces import TraceEntry, read_trace
from hotshoe.errors import ConfigError
from hotshoe.text.tokenizer import load_tokenizer
from hotshoe.weights.checkpoint import open_checkpoint

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:10.5000000,1400,30
2024-05-10 00:00:09.2500000,374,44
2024-05-10 00:01:09.2500000,40,1
"""
MOONCAKE = [
    {"timestamp": 500, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 9]},
    {"timestamp": 3500, "input_length": 600, "output_length": 5, "hash_ids": [7, 30]},
    {"timestamp": 3500, "input_length": 20, "output_length": 4, "hash_ids": [44]},
]


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return path


def words(request: PlannedRequest) -> list[str]:
    (prompt,) = request.turns
    assert isinstance(prompt, str)
    return prompt.split()


def test_a_csv_trace_is_read_in_order_of_time(azure: Path) -> None:
    assert read_trace(azure) == [
        TraceEntry(0.0, 374, 44),
        TraceEntry(1.25, 1400, 30),
        TraceEntry(60.0, 40, 1),
    ]


def test_a_json_trace_has_milliseconds_and_shared_blocks(mooncake: Path) -> None:
    assert read_trace(mooncake) == [
        TraceEntry(0.0, 1100, 9, (7, 8, 9)),
        TraceEntry(3.0, 600, 5, (7, 30)),
        TraceEntry(3.0, 20, 4, (44,)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"neither JSON lines nor a CSV .* missing: TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "missing: GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (AZURE + "yesterday,1,2\n", r"t:5: Invalid isoformat string: 'yesterday'"),
        (AZURE + "2024-05-10 00:00:10,many,2\n", "t:5: invalid literal for int"),
        (AZURE + "2024-05-10 00:00:10,0,2\n", "t:5: got 0 prompt and 2 output tokens"),
        ('{"timestamp": 1, "input_length": 3}\n', "t:1: no 'output_length'"),
        ('{"timestamp": 1\n', "t:1: Expecting"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def settings_of_trace(**changes: object) -> dict[str, object]:
    return {
        "num_prompts": None,
        "sample": False,
        "time_scale": 1.0,
        "length_scale": 1.0,
        "max_total_len": None,
        "seed": 0,
    } | changes


def test_prompts_of_a_trace_share_what_its_requests_shared(mooncake: Path) -> None:
    requests, _ = trace_requests(WordSource(), mooncake, **settings_of_trace())
    first, second, third = map(words, requests)
    assert [len(first), len(second), len(third)] == [1100, 600, 20]
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert third != first[:20]
    assert [request.arrival_s for request in requests] == [0.0, 3.0, 3.0]
    assert [request.output_len for request in requests] == [9, 5, 4]


def test_scales_and_limits_fit_a_trace_to_a_smaller_model(azure: Path, mooncake: Path) -> None:
    scaled = settings_of_trace(time_scale=0.5, length_scale=0.1, max_total_len=100)
    requests, num_left_out = trace_requests(WordSource(), azure, **scaled)
    assert num_left_out == 1
    assert [len(words(request)) for request in requests] == [37, 4]
    assert [request.output_len for request in requests] == [4, 1]
    assert [request.arrival_s for request in requests] == [0.0, 30.0]
    shared, _ = trace_requests(WordSource(), mooncake, **settings_of_trace(length_scale=0.1))
    assert words(shared[0])[:51] == words(shared[1])[:51]


def test_a_sample_of_a_trace_keeps_its_times_and_depends_on_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    rows = "".join(f"{at},{at + 1},1\n" for at in range(100))
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    sampled = settings_of_trace(num_prompts=20, sample=True)
    one, again = (trace_requests(WordSource(), path, **sampled)[0] for _ in range(2))
    other, _ = trace_requests(WordSource(), path, **sampled | {"seed": 1})
    assert one == again != other
    assert len(one) == 20
    times = [request.arrival_s for request in one]
    assert times == sorted(times)
    lengths = [len(words(request)) for request in one]
    assert [length - lengths[0] for length in lengths] == times
    with pytest.raises(ConfigError, match=r"--num-prompts is 101 but .* has 100"):
        trace_requests(WordSource(), path, **settings_of_trace(num_prompts=101))


def test_random_prompts_have_their_lengths_and_come_again_with_the_seed(tiny_path: Path) -> None:
    with open_checkpoint(str(tiny_path)) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    source = TokenSource(tokenizer, as_text=False)
    make = {"num_prompts": 40, "input_len": (3, 6), "output_len": (1, 2)}
    requests = random_requests(source, seed=3, **make)
    assert requests == random_requests(source, seed=3, **make)
    assert requests != random_requests(source, seed=4, **make)
    assert {len(request.turns[0]) for request in requests} == {3, 4, 5, 6}
    assert {request.output_len for request in requests} == {1, 2}
    ids = {token_id for request in requests for token_id in request.turns[0]}
    assert not ids & tokenizer.special_token_ids
    texts = random_requests(TokenSource(tokenizer, as_text=True), seed=3, **make)
    assert all(isinstance(request.turns[0], str) for request in texts)


def test_each_prefix_comes_as_often_as_asked_with_different_endings() -> None:
    requests = prefix_requests(
        WordSource(),
        num_prefixes=3,
        num_per_prefix=5,
        prefix_len=20,
        input_len=(8, 8),
        output_len=(1, 1),
        seed=0,
    )
    prefixes = [tuple(words(request)[:20]) for request in requests]
    assert sorted(prefixes.count(one) for one in set(prefixes)) == [5, 5, 5]
    assert prefixes != sorted(prefixes, key=prefixes.index)
    assert len({tuple(words(request)) for request in requests}) == 15


def test_prompts_from_a_file_are_texts_turns_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    rows = [{"prompt": "one"}, {"id": 2, "turns": ["a", "b"]}, {"messages": messages}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    read = {"sample": False, "seed": 0}
    requests = file_requests(path, num_prompts=None, allow_chat=True, **read)
    assert [request.turns for request in requests] == [("one",), ("a", "b"), (messages,)]
    (first,) = file_requests(path, num_prompts=1, allow_chat=False, **read)
    assert first.turns == ("one",)
    with pytest.raises(
        ConfigError, match=r"p\.jsonl:2: 'turns' are for chats; add --endpoint chat"
    ):
        file_requests(path, num_prompts=2, allow_chat=False, **read)
    path.write_text('{"prompt": 3}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: 'prompt': got 3, allowed: a text"):
        file_requests(path, num_prompts=None, allow_chat=True, **read)
    path.write_text('{"question": "a"}\n')
    with pytest.raises(ConfigError, match="allowed: an object with one of"):
        file_requests(path, num_prompts=None, allow_chat=True, **read)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    requests = [PlannedRequest(turns=("x",))] * 4001
    settings = LoadSettings(
        endpoint="chat", model="m", request_rate=5.0, burstiness=burstiness, seed=1
    )
    times = arrival_times(requests, settings)
    assert times == arrival_times(requests, settings)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.1)
    # a gamma distribution's coefficient of variation
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_without_a_rate_all_come_at_once_and_a_trace_keeps_its_times() -> None:
    settings = LoadSettings(endpoint="chat", model="m", request_rate=math.inf)
    planned = [PlannedRequest(turns=("x",), arrival_s=arrival_s) for arrival_s in (None, 2.0, None)]
    assert arrival_times(planned, settings) == [0.0, 2.0, 0.0]


def record(user: int, sent_s: float, *token_times_s: float, **changes: object) -> RequestRecord:
    end_s = token_times_s[-1] if token_times_s else sent_s + 0.1
    made = RequestRecord(user=user, turn=0, planned_s=sent_s, sent_s=sent_s, end_s=end_s)
    made.token_times_s = list(token_times_s)
    made.num_prompt_tokens, made.num_output_tokens = 10, len(token_times_s)
    made.finish_reason = "length"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


RECORDS = [
    record(0, 0.0, 0.1, 0.2, 0.4, num_cached_tokens=4),  # ttft 100 ms, tpot 150 ms
    record(1, 0.0, 0.3, 0.35, num_output_tokens=3),  # ttft 300, tpot 25: two tokens in one piece
    record(2, 1.0, 1.2),  # ttft 200, one token: no tpot
    record(3, 1.0, 1.1, error="stream", error_message="gone", num_output_tokens=1),
    record(4, 1.5, error="http_429", error_message="full"),
    record(5, 1.5, error="http_429", error_message="full", planned_s=1.25),
]


def test_figures_count_what_succeeded_and_failures_by_kind() -> None:
    summary = summarise(RECORDS)
    assert summary["duration_s"] == pytest.approx(1.6)
    assert (summary["num_requests"], summary["num_succeeded"], summary["num_failed"]) == (6, 3, 3)
    assert summary["errors"] == {"stream": 1, "http_429": 2}
    assert summary["finish_reasons"] == {"length": 3}
    assert summary["num_prompt_tokens"] == 30
    assert summary["num_cached_tokens"] == 4
    assert summary["num_output_tokens"] == 7
    assert summary["output_tokens_per_s"] == pytest.approx(7 / 1.6)
    assert summary["total_tokens_per_s"] == pytest.approx(37 / 1.6)
    assert summary["max_concurrency"] == 2
    assert summary["max_send_delay_s"] == pytest.approx(0.25)
    assert summary["ttft_ms"]["median"] == pytest.approx(200)
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["tpot_ms"]["p50"] == pytest.approx((150 + 25) / 2)
    assert summary["itl_ms"]["median"] == pytest.approx(100)
    assert summary["e2e_ms"]["p99"] == pytest.approx(400 - 0.02 * 50)
    assert "goodput" not in summary


def test_goodput_is_what_meets_every_objective() -> None:
    goodput = summarise(RECORDS, {"ttft": 250, "tpot": 100})["goodput"]
    # the first is slow between tokens, the second to its first token, failures are never good
    assert goodput["num_good"] == 1
    assert goodput["share"] == pytest.approx(1 / 6)
    assert goodput["requests_per_s"] == pytest.approx(1 / 1.6)
    assert summarise(RECORDS, {"e2e": 350})["goodput"]["num_good"] == 2
    assert summarise(RECORDS, {"ttft": 1e9})["goodput"]["num_good"] == 3


def test_a_load_of_which_nothing_succeeded_has_no_latencies() -> None:
    summary = summarise(RECORDS[4:])
    assert summary["ttft_ms"] == dict.fromkeys(["mean", "median", "p50", "p90", "p95", "p99"])
    assert summary["output_tokens_per_s"] == 0


def test_percentiles_lie_between_values() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 5.0])
    assert found == pytest.approx(
        {"mean": 3, "median": 3, "p50": 3, "p90": 4.6, "p95": 4.8, "p99": 4.96}
    )
