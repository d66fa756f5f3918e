"""The official client, as it comes, against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from server.command import RunningServer

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "hotshoe"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_chat_answers_and_streams_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=20
    )
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=20, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_streaming_helper_accumulates_a_whole_answer(client: openai.OpenAI) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "seed": 1, "logprobs": True}
    text = client.chat.completions.create(**settings, max_tokens=12).choices[0].message.content
    # the helper takes an answer that was cut for an error
    settings["stop"] = text[6:8]
    whole = client.chat.completions.create(**settings)
    with client.chat.completions.stream(
        **settings, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_completions_answer_and_stream_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="hello", temperature=0, logprobs=2)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].logprobs is not None
    streamed = client.completions.create(
        model="tiny", prompt="hello", temperature=0, logprobs=2, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_responses_answer_and_stream_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="tiny", input="hello", temperature=0, max_output_tokens=16
    )
    assert whole.output_text
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(
        model="tiny", input="hello", temperature=0, max_output_tokens=16
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    pieces = client.responses.create(
        model="tiny", input="hello", temperature=0, max_output_tokens=16, stream=True
    )
    text = "".join(event.delta for event in pieces if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_errors_arrive_as_the_classes_that_callers_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_value"
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as stream:
        client.chat.completions.create(model="tiny", messages=[], stream=True)
    assert stream.value.param == "messages"


def test_extra_body_reaches_the_extensions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=4,
        extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True},
    )
    assert len(answer.choices[0].model_extra["token_ids"]) == 4
    assert len(answer.model_extra["prompt_token_ids"]) == answer.usage.prompt_tokens


def test_the_async_client_runs_many_requests_at_once(server: RunningServer) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        prompt = f"question {number}"
        whole = await client.completions.create(model="tiny", prompt=prompt, temperature=0)
        stream = await client.completions.create(
            model="tiny", prompt=prompt, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].text async for chunk in stream]
        return whole.choices[0].text, "".join(pieces)

    async def run() -> list[tuple[str, str]]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*[ask(client, number) for number in range(16)])

    answers = asyncio.run(run())
    assert all(whole == streamed for whole, streamed in answers)
    assert len({whole for whole, _ in answers}) > 1


def test_a_client_that_leaves_its_stream_can_go_on(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client.completions.create(model="tiny", prompt="x").choices


def test_the_client_tries_again_after_429(server: RunningServer) -> None:
    """A full queue is played by a transport; that the server says so is tested elsewhere."""
    answers = [429]

    def refuse_once(request: httpx.Request) -> httpx.Response:
        if answers:
            body = {"error": {"message": "full", "type": "rate_limit_error", "code": "queue_full"}}
            return httpx.Response(answers.pop(), json=body, headers={"retry-after": "0.01"})
        with httpx.Client() as real:
            answer = real.send(request)
        return httpx.Response(200, content=answer.content, headers=answer.headers)

    transport = httpx.MockTransport(refuse_once)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", http_client=httpx.Client(transport=transport)
    ) as client:
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert answer.choices
    assert not answers
