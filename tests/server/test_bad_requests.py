"""What a server says to requests that it can't serve, and that it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = [{"role": "user", "content": "x"}]
pytestmark = pytest.mark.usefixtures("idle")


@pytest.fixture(autouse=True)
def goes_on(http: httpx.Client) -> Iterator[None]:
    """The next request is served."""
    yield
    assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def error_of(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return body["error"]


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "got 0 prompts"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "is empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "is empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": [259]}, "prompt", "259 is out of range"),
    (COMPLETIONS, {"prompt": ["a"] * 600}, "prompt", "allowed: 1 to 512"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "n", "server.max_queue"),
    (COMPLETIONS, {"prompt": "x" * 300}, "prompt", "context length is 256"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 300}, "max_tokens", "context length is 256"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens", "got -1"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2**70}, "max_tokens", "got"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", "got '5'"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "min_tokens": 1}, "min_tokens", "got 1"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "got 0"),
    (COMPLETIONS, {"prompt": "x", "n": 129}, "n", "at most 128"),
    (COMPLETIONS, {"prompt": "x", "n": True}, "n", "got True"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, "temperature", "allowed: 0 to 100"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p", "allowed: above 0"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, "top_k", "got -2"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p", "allowed: 0 to 1"),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    (COMPLETIONS, {"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "server.max_logprobs, 20"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs", "got True"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "at most"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed", "got"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "none of them empty"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 65}, "stop", "at most 64"),
    (COMPLETIONS, {"prompt": "x", "stop": "a" * 1001}, "stop", "at most 1000"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [259]}, "stop_token_ids", "below 259"),
    (COMPLETIONS, {"prompt": "x", "logits_processors": ["nope"]},
     "logits_processors", "got 'nope', allowed: loaded processors: none"),
    (COMPLETIONS, {"prompt": "x", "logits_processors": ["a", "a"]},
     "logits_processors", "each name once"),
    (COMPLETIONS, {"prompt": "x", "extra_args": {"a": {"b": [2**70]}}}, "extra_args", "at 'a'"),
    (COMPLETIONS, {"prompt": "x", "extra_args": [1]}, "extra_args", "got [1]"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
     "allowed_token_ids", "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [97], "bad_words": ["a"]},
     "allowed_token_ids", "bad_words"),
    (COMPLETIONS, {"prompt": "x", "bad_words": [""]}, "bad_words", "none of them empty"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "key 'a'"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": "x"}}, "logit_bias", "a number at '5'"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 0 for i in range(5000)}}, "logit_bias",
     "at most 4096"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", "below 259"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "stream true"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, "cache_salt", "got ''"),
    (COMPLETIONS, {"prompt": "x", "priority": 2**40}, "priority", "got"),
    (COMPLETIONS, {"prompt": "x", "metadata": {"a": [1]}}, "metadata", "a text, number"),
    (COMPLETIONS, {"prompt": "x", "metadata": {"a": 2**70}}, "metadata", "at 'a'"),
    (RESPONSES, {"input": "x", "metadata": {"a": -(2**64)}}, "metadata", "at 'a'"),
    (COMPLETIONS, {"prompt": "x", "metadata": {str(i): 1 for i in range(17)}}, "metadata", "16"),
    (COMPLETIONS, {"prompt": "x", "user": "a", "metadata": {"user": "b"}}, "user", "send one"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported yet"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of", "not supported yet"),
    (COMPLETIONS, {"prompt": "x", "tempratur": 1}, "tempratur", "unknown field 'tempratur'"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": "x"}, "messages", "valid"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "text"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function", "expected an"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (CHAT, {"messages": USER, "audio": {}}, "audio", "not supported yet"),
    (CHAT, {"messages": USER, "store": True}, "store", "not supported yet"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities", "not supported yet"),
    (CHAT, {"messages": USER, "logprobs": 3}, "logprobs", "valid boolean"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens", "got 0"),
    (CHAT, {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one"),
    (CHAT, {"messages": USER, "chat_template": "x"}, "chat_template", "no templates from clients"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", ""),
    (CHAT, {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
     "messages", "can't both be true"),
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", ""),
    (RESPONSES, {}, "input", "missing"),
    (RESPONSES, {"input": []}, "input", "at least one message"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, "input.0", "item_reference"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input.0.content", "input_image"),
    (RESPONSES, {"input": [{"role": 5, "content": "x"}]}, "input.0.role", "got 5"),
    (RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response_id", "yet"),
    (RESPONSES, {"input": "x", "background": True}, "background", "not supported yet"),
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt", "either prompt or messages"),
    ("/detokenize", {"tokens": [300]}, "tokens", "out of range"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0", "got -1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param", "words"), BAD, ids=[f"{i}-{one[2]}" for i, one in enumerate(BAD)]
)
def test_bad_input_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(http.post(path, json=body), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    if "stream_options" not in body and path in (COMPLETIONS, CHAT, RESPONSES):
        streamed = http.post(path, json={**body, "stream": True})
        assert error_of(streamed, 400)["param"] == param


@pytest.mark.parametrize(
    "neutral",
    [
        {"suffix": None, "best_of": 1, "response_format": {"type": "text"}},
        {"guided_json": None, "logit_bias": None, "user": None, "service_tier": "auto"},
        {"stop": None, "n": None, "temperature": None, "stream": False, "stream_options": None},
    ],
)
def test_fields_that_say_nothing_are_taken(http: httpx.Client, neutral: dict[str, Any]) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **neutral})
    assert response.status_code == 200, response.text


def test_neutral_fields_of_chat_and_responses_are_taken(http: httpx.Client) -> None:
    chat = {"tools": [], "tool_choice": "auto", "modalities": ["text"], "store": False}
    body = {"messages": USER, "max_tokens": 1, "parallel_tool_calls": True, **chat}
    assert http.post(CHAT, json=body).status_code == 200
    text = {"text": {"format": {"type": "text"}}, "truncation": "disabled", "include": []}
    body = {"input": "x", "max_output_tokens": 1, "store": False, **text}
    assert http.post(RESPONSES, json=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000,
     b'{"prompt": "\\ud800"}', b'{"prompt": "x", "user": "\\udfff"}'],
)  # fmt: skip
def test_a_body_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error = error_of(http.post(COMPLETIONS, content=body, headers=headers), 400)
    assert error["code"] in ("invalid_json", "invalid_type")


def test_numbers_beyond_json_are_refused(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for text in ("NaN", "Infinity", "1e999"):
        for field in (f'"temperature": {text}', f'"metadata": {{"a": {text}}}'):
            body = f'{{"prompt": "x", {field}}}'.encode()
            error_of(http.post(COMPLETIONS, content=body, headers=headers), 400)


def test_the_media_type_must_be_json(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    error = error_of(http.post(COMPLETIONS, content=body), 415)
    assert error["code"] == "unsupported_media_type"
    headers = {"content-type": "application/json; charset=utf-8"}
    assert http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


def test_unknown_models_paths_and_methods(http: httpx.Client) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = error_of(http.post(path, json={**body, "model": "gpt"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'tiny'" in error["message"]
    assert error_of(http.get("/v1/models/some/thing"), 404)["code"] == "model_not_found"
    slash = http.post(f"{COMPLETIONS}/", json={"prompt": "x"}, follow_redirects=False)
    assert error_of(slash, 404)["code"] == "unknown_url"
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = http.get(COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_an_error_in_a_huge_body_is_found_at_once(http: httpx.Client) -> None:
    many = 300_000
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": [1] * many + ["x"]}),
        (COMPLETIONS, {"prompt": "x", "stop": [1] * many}),
        (COMPLETIONS, {"prompt": "x", "metadata": {str(i): [] for i in range(many)}}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): "" for i in range(many)}}),
        (COMPLETIONS, {"prompt": "x", **{str(i): 0 for i in range(many)}}),
        (CHAT, {"messages": [1] * many}),
        (CHAT, {"messages": [{"role": "user", "content": [1] * many}]}),
        (RESPONSES, {"input": [1] * many}),
    ]
    for path, body in bodies:
        response = http.post(path, json=body)
        error_of(response, 400)
        assert len(response.content) < 2000


def test_a_bad_query_is_named_in_the_same_shape(http: httpx.Client) -> None:
    response = http.get("/live?after=x")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "after"
