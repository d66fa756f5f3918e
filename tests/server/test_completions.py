"""``/v1/completions``, as it goes over the wire."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotshoe import LLM, SamplingParams
from server.events import stream, texts_of

PATH = "/v1/completions"
pytestmark = pytest.mark.usefixtures("idle")


@pytest.fixture(scope="module")
def offline(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), dtype="float32", max_model_len=256, max_num_seqs=8) as one:
        yield one


def complete(http: httpx.Client, **body: Any) -> Any:
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_the_answer_has_openai_s_shape(http: httpx.Client) -> None:
    answer = complete(http, prompt="hello", temperature=0)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -3}, {"seed": 2**64 - 3}),
        ({"seed": 3, "top_k": 3}, {"seed": 3, "top_k": 3}),
        ({"seed": 3, "top_p": 0.3}, {"seed": 3, "top_p": 0.3}),
        ({"seed": 3, "min_p": 0.4}, {"seed": 3, "min_p": 0.4}),
        ({"seed": 3, "temperature": 0.2}, {"seed": 3, "temperature": 0.2}),
        ({"temperature": 0, "logit_bias": {"65": 100}}, {
            "temperature": 0, "logit_bias": {65: 100}}),
        ({"temperature": 0, "allowed_token_ids": [65, 66]}, None),
        ({"temperature": 0, "presence_penalty": 2}, None),
        ({"temperature": 0, "frequency_penalty": 2}, None),
        ({"temperature": 0, "repetition_penalty": 2}, None),
        ({"temperature": 0, "bad_words": ["o"]}, None),
        ({"temperature": 0, "max_tokens": 3}, None),
        ({"temperature": 0, "stop_token_ids": [65], "logit_bias": {"65": 100}}, {
            "temperature": 0, "stop_token_ids": [65], "logit_bias": {65: 100}}),
        ({"temperature": 0, "stop": ["A"], "min_tokens": 4, "logit_bias": {"65": 100}}, {
            "temperature": 0, "stop": ["A"], "min_tokens": 4, "logit_bias": {65: 100}}),
        ({"temperature": 0, "stop": "A", "include_stop_str_in_output": True,
          "logit_bias": {"65": 100}}, {
            "temperature": 0, "stop": ["A"], "include_stop_str_in_output": True,
            "logit_bias": {65: 100}}),
        ({"temperature": 0, "logit_bias": {"258": 100}}, {
            "temperature": 0, "logit_bias": {258: 100}}),
        ({"temperature": 0, "ignore_eos": True, "skip_special_tokens": False,
          "logit_bias": {"258": 100}}, {
            "temperature": 0, "ignore_eos": True, "skip_special_tokens": False,
            "logit_bias": {258: 100}}),
        ({"seed": 4, "n": 3}, {"seed": 4, "n": 3}),
    ],
)  # fmt: skip
def test_every_parameter_means_what_it_means_offline_streamed_or_not(
    http: httpx.Client, offline: LLM, fields: dict[str, Any], params: dict[str, Any] | None
) -> None:
    expected = offline.generate("hello", SamplingParams(**(params or fields)))[0]
    answer = complete(http, prompt="hello", **fields)
    assert texts(answer) == [one.text for one in expected.outputs]
    assert [one["finish_reason"] for one in answer["choices"]] == [
        one.finish_reason for one in expected.outputs
    ]
    assert [one["stop_reason"] for one in answer["choices"]] == [
        one.stop_reason for one in expected.outputs
    ]
    num_tokens = sum(len(one.token_ids) for one in expected.outputs)
    assert answer["usage"]["completion_tokens"] == num_tokens
    streamed = texts_of(stream(http, PATH, prompt="hello", **fields))
    assert streamed == dict(enumerate(texts(answer)))


def test_choices_are_distinct_and_come_again_with_the_seed(http: httpx.Client) -> None:
    first = texts(complete(http, prompt="x", n=4, seed=7))
    assert len(set(first)) == 4
    assert texts(complete(http, prompt="x", n=4, seed=7)) == first
    assert texts(complete(http, prompt="x", seed=7)) == first[:1]


@pytest.mark.parametrize("form", ["texts", "ids"])
def test_several_prompts_are_answered_in_their_order(http: httpx.Client, form: str) -> None:
    words = ["one", "two", "three"]
    prompts = words if form == "texts" else [[*word.encode()] for word in words]
    answer = complete(http, prompt=prompts, n=2, seed=1, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [texts(complete(http, prompt=word, n=2, seed=1, max_tokens=6)) for word in words]
    assert texts(answer) == [text for pair in alone for text in pair]
    assert answer["usage"]["prompt_tokens"] == 11
    streamed = texts_of(stream(http, PATH, prompt=prompts, n=2, seed=1, max_tokens=6))
    assert streamed == dict(enumerate(texts(answer)))


def test_one_list_of_ids_is_one_prompt(http: httpx.Client) -> None:
    answer = complete(http, prompt=[*b"hello"], temperature=0)
    assert texts(answer) == texts(complete(http, prompt="hello", temperature=0))


def test_usage_comes_once_at_the_end_and_only_if_asked_for(http: httpx.Client) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 5}
    assert not any(chunk.get("usage") for chunk in stream(http, PATH, **body))
    chunks = stream(http, PATH, **body, stream_options={"include_usage": True})
    assert [bool(chunk["usage"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, PATH, **body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_cached_tokens_are_counted_whatever_ends_the_answer(http: httpx.Client) -> None:
    prompt = "a text that is longer than a few blocks of sixteen tokens"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4}
    text = texts(complete(http, **body, cache_salt="counted"))[0]
    for more in ({}, {"stop": text[-1]}):
        usage = complete(http, **body, **more, cache_salt="counted")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 48
    usage = complete(http, **body, cache_salt="other")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_log_probabilities_have_openai_s_columns(http: httpx.Client) -> None:
    answer = complete(http, prompt="hello", temperature=0, max_tokens=6, logprobs=3)
    columns = answer["choices"][0]["logprobs"]
    assert set(columns) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert {len(column) for column in columns.values()} == {6}
    for token, logprob, top in zip(
        columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3
    chunks = stream(http, PATH, prompt="hello", temperature=0, max_tokens=6, logprobs=3)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, column in columns.items():
        assert [value for piece in pieces for value in piece[name]] == column


def test_offsets_point_into_the_text(http: httpx.Client) -> None:
    answer = complete(
        http,
        prompt="aé€x",
        echo=True,
        logprobs=0,
        max_tokens=8,
        temperature=0,
        allowed_token_ids=[*b"abcdef"],
    )
    choice = answer["choices"][0]
    columns = choice["logprobs"]
    assert choice["text"].startswith("aé€x")
    assert columns["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[6:]:
        assert choice["text"][offset] == token


def test_impossible_tokens_have_a_number_that_json_has(http: httpx.Client) -> None:
    answer = complete(
        http, prompt="x", temperature=0, max_tokens=3, allowed_token_ids=[65], logprobs=5
    )
    assert texts(answer) == ["AAA"]
    for logprob in answer["choices"][0]["logprobs"]["token_logprobs"]:
        assert -9999.0 <= logprob <= 0


def test_echo_repeats_the_prompt_with_its_log_probabilities(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 4, "n": 2}
    own = complete(http, **body, logprobs=1)
    echoed = complete(http, **body, logprobs=1, echo=True)
    for choice, plain in zip(echoed["choices"], own["choices"], strict=True):
        assert choice["text"] == "hello" + plain["text"]
        columns = choice["logprobs"]
        assert columns["tokens"][:5] == [*"hello"]
        assert columns["token_logprobs"][0] is None
        assert all(value < 0 for value in columns["token_logprobs"][1:])
        assert columns["tokens"][5:] == plain["logprobs"]["tokens"]
    chunks = stream(http, PATH, **body, logprobs=1, echo=True)
    assert texts_of(chunks) == dict(enumerate(texts(echoed)))
    ids = complete(http, prompt=[*b"hello"], temperature=0, max_tokens=4, echo=True)
    assert texts(ids)[0].startswith("hello")


def test_max_tokens_0_scores_the_prompt_and_nothing_else(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = complete(http, **body)
    assert texts(answer) == ["hello"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 5
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5
    chunks = stream(http, PATH, **body)
    assert texts_of(chunks) == {0: "hello"}
    assert chunks[0]["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]


def test_prompt_log_probabilities_and_token_ids_come_on_demand(
    http: httpx.Client, offline: LLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    expected = offline.generate("hello", params)[0]
    assert expected.prompt_logprobs is not None
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 3}
    answer = complete(http, **body, prompt_logprobs=2, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["prompt_logprobs"][0] is None
    for told, known in zip(
        choice["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert known is not None
        entry = told[str(known.token.token_id)]
        assert entry["logprob"] == pytest.approx(known.token.logprob, abs=1e-4)
        assert entry["rank"] == known.token.rank
    chunks = stream(http, PATH, **body, prompt_logprobs=2, return_token_ids=True)
    first = chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == expected.prompt_token_ids
    assert len(first["prompt_logprobs"]) == 5
    ids = [i for chunk in chunks for one in chunk["choices"] for i in one["token_ids"]]
    assert ids == expected.outputs[0].token_ids


def test_a_prompt_can_be_cut_from_the_left(http: httpx.Client) -> None:
    cut = complete(http, prompt="say hello", temperature=0, truncate_prompt_tokens=5)
    assert texts(cut) == texts(complete(http, prompt="hello", temperature=0))
    assert cut["usage"]["prompt_tokens"] == 5
    fits = complete(http, prompt="x" * 1000, max_tokens=6, truncate_prompt_tokens=-1)
    assert fits["usage"]["prompt_tokens"] == 250


def test_stop_when_the_end_token_falls_on_the_last_allowed_one(http: httpx.Client) -> None:
    answer = complete(http, prompt="x", temperature=0, max_tokens=1, logit_bias={"258": 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert texts(answer) == [""]


def test_nothing_of_a_stop_string_leaks(http: httpx.Client) -> None:
    body = {"prompt": "x", "seed": 2, "max_tokens": 40, "allowed_token_ids": [*b"ab "]}
    text = texts(complete(http, **body))[0]
    stop = text[20:24]
    answer = complete(http, **body, stop=[stop])
    assert texts(answer) == [text[: text.index(stop)]]
    assert answer["choices"][0]["stop_reason"] == stop
    assert answer["usage"]["completion_tokens"] == text.index(stop) + len(stop)
    assert texts_of(stream(http, PATH, **body, stop=[stop])) == {0: texts(answer)[0]}


def test_no_half_characters_in_a_stream(http: httpx.Client) -> None:
    # three bytes that make up a sign of three, one of two, or nothing, as chance will have it
    body = {"prompt": "x", "max_tokens": 60, "allowed_token_ids": [0xE2, 0x82, 0xAC, 0xC3, 0xA9]}
    wholes = []
    for seed in range(6):
        wholes.append(texts(complete(http, **body, seed=seed))[0])
        chunks = stream(http, PATH, **body, seed=seed)
        assert texts_of(chunks) == {0: wholes[-1]}
        # a chunk per byte would show halves
        assert len(chunks) < 60
    assert "€" in "".join(wholes)
    euro = {"prompt": [*b"x", 0xE2, 0x82], "max_tokens": 1, "allowed_token_ids": [0xAC]}
    assert texts_of(stream(http, PATH, **euro)) == {0: "€"}


def test_equal_request_ids_do_not_clash(http: httpx.Client) -> None:
    def ask(number: int) -> Any:
        return complete(http, prompt=f"{number}", temperature=0, request_id="same", max_tokens=20)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert {answer["id"] for answer in answers} == {"cmpl-same"}
    assert [texts(answer) for answer in answers] == [texts(ask(number)) for number in range(8)]


def test_options_of_schedulers_are_taken(http: httpx.Client) -> None:
    answer = complete(
        http, prompt="x", priority=-5, metadata={"tenant": "a", "weight": 2}, user="me"
    )
    assert answer["choices"]


def test_a_server_s_models_are_told(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["max_model_len"] == 256
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
