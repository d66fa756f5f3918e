"""``/v1/chat/completions``, ``/v1/responses`` and tokenizing, as they go over the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from server.events import data_of, stream, texts_of

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.usefixtures("idle")


def post(http: httpx.Client, path: str = PATH, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def content(answer: Any) -> str:
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def test_an_answer_fills_the_context_unless_limited(http: httpx.Client) -> None:
    answer = post(http, messages=MESSAGES, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_conversation_is_rendered_by_the_template(http: httpx.Client) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = post(http, messages=MESSAGES, temperature=0, max_tokens=8, return_token_ids=True)
    tokens = post(http, "/tokenize", messages=MESSAGES)["tokens"]
    assert answer["prompt_token_ids"] == tokens
    assert tokens == post(http, "/tokenize", prompt=rendered)["tokens"]
    plain = post(http, "/v1/completions", prompt=tokens, temperature=0, max_tokens=8)
    assert content(answer) == plain["choices"][0]["text"]


def test_text_parts_and_developer_messages_are_understood(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert (
        post(http, "/tokenize", messages=[{"role": "user", "content": parts}])
        == post(http, "/tokenize", messages=MESSAGES)
    )  # fmt: skip
    developer = post(http, "/tokenize", messages=[{"role": "developer", "content": "x"}])
    assert developer == post(http, "/tokenize", messages=[{"role": "system", "content": "x"}])


def test_the_last_message_can_be_continued(http: httpx.Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "well"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    answer = post(http, **body, return_token_ids=True)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nwell"
    assert answer["prompt_token_ids"] == post(http, "/tokenize", prompt=rendered)["tokens"]
    closed = post(http, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
    assert closed["count"] < post(http, "/tokenize", messages=MESSAGES)["count"]


def test_a_stream_opens_with_the_role_and_ends_with_the_reason(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "seed": 1, "n": 2, "max_tokens": 9}
    whole = post(http, **body)
    chunks = stream(http, PATH, **body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index, choice in enumerate(whole["choices"]):
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        reasons = [one["finish_reason"] for one in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert texts_of(chunks)[index] == choice["message"]["content"]


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_of_a_stream(http: httpx.Client, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = stream(http, PATH, messages=MESSAGES, max_tokens=5, stream_options=options)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == chunks[-1]["usage"]["prompt_tokens"] + 5
    assert [one for one in chunks[:-1] if bool(one["usage"]) != continuous] == []


def test_log_probabilities_name_tokens_bytes_and_rivals(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 5, "logprobs": True}
    entries = post(http, **body, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert -9999 <= entry["top_logprobs"][1]["logprob"] <= entry["logprob"] <= 0
    chunks = stream(http, PATH, **body, top_logprobs=2)
    pieces = [one["choices"][0]["logprobs"] for one in chunks]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == entries
    plain = post(http, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[]] * 5
    assert post(http, messages=MESSAGES, max_tokens=1)["choices"][0]["logprobs"] is None


def test_prompt_log_probabilities_lie_beside_the_choices(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "prompt_logprobs": 1}
    answer = post(http, **body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    chunks = stream(http, PATH, **body)
    assert chunks[0]["prompt_logprobs"] == answer["prompt_logprobs"]
    assert texts_of(chunks) == {0: content(answer)}


def test_responses_have_openai_s_shape(http: httpx.Client) -> None:
    answer = post(
        http, "/v1/responses", input="hi", max_output_tokens=5, temperature=0, metadata={"a": "b"}
    )
    assert answer["object"] == "response"
    assert answer["id"].startswith("resp_")
    assert answer["status"] == "incomplete"
    assert answer["metadata"] == {"a": "b"}
    (message,) = answer["output"]
    assert message["role"] == "assistant"
    chat = post(http, messages=MESSAGES, max_tokens=5, temperature=0)
    assert message["content"][0]["text"] == content(chat)
    assert answer["usage"]["output_tokens"] == 5
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_response_can_end_by_itself(http: httpx.Client) -> None:
    body = {"input": [{"role": "user", "content": "hi"}], "temperature": 100.0, "seed": 5}
    answer = post(http, "/v1/responses", **body, top_k=0)
    assert answer["status"] in ("completed", "incomplete")
    assert (answer["incomplete_details"] is None) == (answer["status"] == "completed")


def test_events_of_a_response_are_numbered_and_complete(http: httpx.Client) -> None:
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    body = {"input": items, "instructions": "x", "max_output_tokens": 6, "seed": 3, "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as response:
        events = [json.loads(one) for one in data_of(response)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events if not event["type"].endswith("delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.get("delta", "") for event in events)
    assert text == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert text == next(event["text"] for event in events if "text" in event)


def test_tokens_and_texts_go_both_ways(http: httpx.Client) -> None:
    told = post(http, "/tokenize", prompt="aé", return_token_strs=True)
    assert told == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [97, 195, 169],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    assert post(http, "/detokenize", tokens=[97, 195, 169]) == {"prompt": "aé"}
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}
    special = post(http, "/detokenize", tokens=[257, 97])
    assert special == {"prompt": "<|im_start|>a"}
    assert post(http, "/detokenize", tokens=[257, 97], skip_special_tokens=True) == {"prompt": "a"}
    # long enough to be done aside
    assert post(http, "/tokenize", prompt="x" * 10_000)["count"] == 10_000
