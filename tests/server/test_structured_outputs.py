"""Constraints on outputs, over HTTP: every form of them, bad ones, and many at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from server.command import RunningServer, start_server
from server.conftest import wait_until_idle

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
INPUTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 120},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 120},
    RESPONSES: {"input": "x", "max_output_tokens": 120},
}
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "rain": {"type": "boolean"}},
    "required": ["sky", "rain"],
    "additionalProperties": False,
}
YES_OR_NO = ["yes", "no"]
HEX = "[0-9a-f]{4}-[0-9a-f]{2}"
SUM = 'root ::= digit "+" digit\ndigit ::= [0-9]'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<sky>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</sky>",
    },
}
SLOW_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                f"key{one}{two}": {"type": "integer", "minimum": one, "maximum": 10**9 + two}
                for two in range(20)
            },
        }
        for one in range(120)
    ]
}
"""Takes about a second to compile."""
pytestmark = pytest.mark.usefixtures("idle")


class Sky(BaseModel):
    """What a client may want to be told of the sky."""

    colour: Literal["blue", "grey"]
    clouds: list[Literal["cirrus", "cumulus"]] = Field(max_length=2)


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema, **more}}


def text_format(kind: str, **more: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": kind, **more}}}


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def ask(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=INPUTS[path] | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=INPUTS[path] | fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] in error["message"].split(";")[0]
    return error


def is_sky(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"sky", "rain"} and value["sky"] in ("blue", "grey")


def is_tagged_sky(text: str) -> bool:
    return is_sky(text.removeprefix("<sky>").removesuffix("</sky>"))


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


is_hex, is_sum = matches(HEX), matches("[0-9][+][0-9]")
is_yes_or_no, is_object = matches("yes|no"), matches(r"(?s)\s*\{.*")

FORMS: list[tuple[str, dict[str, Any], Callable[[str], bool]]] = [
    (CHAT, {"response_format": schema_format(SCHEMA, strict=True, description="x")}, is_sky),
    (CHAT, {"response_format": schema_format(SCHEMA, strict=False)}, is_sky),
    (CHAT, {"response_format": schema_format(json.dumps(SCHEMA))}, is_sky),
    (CHAT, {"response_format": {"type": "json_object"}}, is_object),
    (CHAT, {"response_format": TAG}, is_tagged_sky),
    (CHAT, {"structured_outputs": {"regex": HEX}}, is_hex),
    (CHAT, {"guided_choice": YES_OR_NO}, is_yes_or_no),
    (COMPLETIONS, {"response_format": schema_format(SCHEMA)}, is_sky),
    (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}}, is_sky),
    (COMPLETIONS, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_sky),
    (COMPLETIONS, {"structured_outputs": {"json_object": True}}, is_object),
    (COMPLETIONS, {"structured_outputs": {"regex": HEX, "backend": "xgrammar"}}, is_hex),
    (COMPLETIONS, {"structured_outputs": {"choice": YES_OR_NO}}, is_yes_or_no),
    (COMPLETIONS, {"structured_outputs": {"grammar": SUM}}, is_sum),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": TAG}}, is_tagged_sky),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}, is_tagged_sky),
    (COMPLETIONS, {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, is_sky),
    (COMPLETIONS, {"guided_json": json.dumps(SCHEMA), "guided_json_object": False}, is_sky),
    (COMPLETIONS, {"guided_json_object": True}, is_object),
    (COMPLETIONS, {"guided_regex": HEX}, is_hex),
    (COMPLETIONS, {"guided_grammar": SUM}, is_sum),
    (RESPONSES, text_format("json_schema", name="sky", schema=SCHEMA, strict=True), is_sky),
    (RESPONSES, text_format("json_object"), is_object),
    (RESPONSES, {"structured_outputs": {"regex": HEX}}, is_hex),
]  # fmt: skip


def test_every_form_of_a_constraint_is_enforced(http: httpx.Client) -> None:
    for path, fields, is_right in FORMS:
        for seed in range(2):
            text = text_of(ask(http, path, seed=seed, **fields))
            assert is_right(text), (path, fields, text)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": schema_format({"type": "sky"})}, "response_format", "sky"),
    (CHAT, {"response_format": schema_format("{")}, "response_format", "no JSON"),
    (CHAT, {"response_format": schema_format("")}, "response_format", "not empty"),
    (CHAT, {"response_format": schema_format(5)}, "response_format.json_schema.schema", "object"),
    (CHAT, {"response_format": schema_format(None)}, "response_format.json_schema.schema", "is"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type", "'json_object'"),
    (CHAT, {"response_format": schema_format(SCHEMA) | {"type": "json_object"}},
     "response_format.json_schema", "only for type 'json_schema'"),
    (CHAT, {"response_format": TAG | {"format": {"type": "sky"}}}, "response_format", ""),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format", ""),
    (CHAT, {"response_format": {"type": "text", "format": {}}}, "response_format.format", "only"),
    (CHAT, {"response_format": schema_format(SCHEMA, strickt=True)},
     "response_format.json_schema.strickt", "unknown field"),
    (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs", "no constraint"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "closed"),
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least"),
    (COMPLETIONS, {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "empty"),
    (COMPLETIONS, {"structured_outputs": {"json": SCHEMA, "regex": HEX}},
     "structured_outputs.regex", "and so is structured_outputs.json"),
    (COMPLETIONS, {"structured_outputs": {"regex": HEX, "backend": "bnf"}},
     "structured_outputs.backend", "'xgrammar'"),
    (COMPLETIONS, {"structured_outputs": {"regex": HEX, "whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern", "not supported yet"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "x" * 2**20 + "y"}},
     "structured_outputs.grammar", "max_spec_bytes"),
    (COMPLETIONS, {"structured_outputs": [HEX]}, "structured_outputs", "an object"),
    (COMPLETIONS, {"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
    (COMPLETIONS, {"guided_grammar": "root ::= sky"}, "guided_grammar", "sky"),
    (COMPLETIONS, {"prompt": ["x", "y"], "n": 3, "guided_regex": "("}, "guided_regex", "closed"),
    (COMPLETIONS, {"guided_regex": ""}, "guided_regex", "not empty"),
    (COMPLETIONS, {"guided_regex": HEX, "response_format": {"type": "json_object"}},
     "response_format", "and so is guided_regex"),
    (COMPLETIONS, {"guided_regex": HEX, "guided_decoding_backend": "bnf"},
     "guided_decoding_backend", "'xgrammar'"),
    (COMPLETIONS, {"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "none"),
    (COMPLETIONS, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "supported yet"),
    (COMPLETIONS, {"guided_regex": HEX, "ignore_eos": True}, "ignore_eos", "structured_outputs"),
    (RESPONSES, text_format("json_schema", name="x"), "text.format.schema", "missing"),
    (RESPONSES, text_format("json_schema", schema={"type": "sky"}), "text.format", "sky"),
    (RESPONSES, text_format("text") | {"structured_outputs": {"regex": "["}},
     "structured_outputs.regex", ""),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "'medium'"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_constraint_is_refused_by_its_name_and_the_next_is_enforced(
    http: httpx.Client, stream: bool
) -> None:
    for path, fields, param, words in BAD:
        error = refused(http, path, stream=stream, **fields)
        assert (error["param"], words in error["message"]) == (param, True), (fields, error)
        assert len(error["message"]) < 1500
        assert is_hex(text_of(ask(http, path, structured_outputs={"regex": HEX})))


def test_a_number_that_json_does_not_have_is_refused(http: httpx.Client) -> None:
    body = b'{"prompt": "x", "guided_json": {"const": NaN}}'
    headers = {"content-type": "application/json"}
    response = http.post(COMPLETIONS, content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "guided_json"


def test_a_response_says_which_format_it_has(http: httpx.Client) -> None:
    fields = text_format("json_schema", name="sky", schema=SCHEMA, strict=True)
    assert ask(http, RESPONSES, **fields)["text"] == fields["text"]


def test_a_cut_output_is_the_beginning_of_a_right_one(http: httpx.Client) -> None:
    answer = ask(http, COMPLETIONS, guided_choice=["abcdefgh"], max_tokens=5)
    assert answer["choices"][0]["text"] == "abcde"
    assert answer["choices"][0]["finish_reason"] == "length"


def test_choices_are_constrained_one_by_one(http: httpx.Client) -> None:
    answer = ask(http, CHAT, guided_regex=HEX, n=4, temperature=2)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(map(is_hex, texts))
    assert len(set(texts)) > 1
    prompts = ["one", "two", "three"]
    answer = ask(http, COMPLETIONS, prompt=prompts, guided_regex=HEX)
    assert [is_hex(choice["text"]) for choice in answer["choices"]] == [True] * 3


def test_a_stop_string_ends_a_constrained_output_early(http: httpx.Client) -> None:
    choice = ask(http, COMPLETIONS, guided_choice=["red, green, blue"], stop="green")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("red, ", "stop")


def test_constrained_tokens_have_log_probabilities(http: httpx.Client) -> None:
    choice = ask(http, COMPLETIONS, guided_choice=["ab"], logprobs=1)["choices"][0]
    assert choice["logprobs"]["tokens"][:2] == ["a", "b"]
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][:2])


def test_min_tokens_holds_while_the_constraint_allows_it(http: httpx.Client) -> None:
    text = text_of(ask(http, COMPLETIONS, guided_regex="[ab]{1,40}", min_tokens=20))
    assert matches("[ab]{20,40}")(text)
    error = refused(http, COMPLETIONS, guided_choice=["ab"], min_tokens=20)
    assert error["param"] == "min_tokens"
    assert "the structured output" in error["message"]


def test_a_stream_is_the_text_of_the_whole(http: httpx.Client) -> None:
    fields = {"response_format": schema_format(SCHEMA), "seed": 3}
    whole = text_of(ask(http, CHAT, **fields))
    with http.stream("POST", CHAT, json=INPUTS[CHAT] | fields | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole
    assert is_sky(whole)
    assert chunks[-1]["finish_reason"] == "stop"


def test_many_clients_with_different_constraints_do_not_meet(server: RunningServer) -> None:
    async def one(http: httpx.AsyncClient, number: int) -> None:
        path, fields, is_right = FORMS[number % len(FORMS)]
        body = INPUTS[path] | fields | {"seed": number}
        if number % 5 == 4:
            path, bad, _, _ = BAD[number % len(BAD)]
            assert (await http.post(path, json=INPUTS[path] | bad)).status_code == 400
            return
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert is_right(text_of(response.json())), (fields, response.text)

    async def client(http: httpx.AsyncClient, first: int) -> None:
        for number in range(first, 48, 8):
            await one(http, number)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            await asyncio.gather(*[client(http, first) for first in range(8)])

    asyncio.run(run())


def test_a_client_that_leaves_while_its_constraint_compiles_leaves_nothing(
    http: httpx.Client,
) -> None:
    for stream in (False, True):
        # another constraint each time, or it would be compiled already
        body = INPUTS[COMPLETIONS] | {"guided_json": SLOW_SCHEMA | {"title": str(stream)}}
        with pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json=body | {"stream": stream}, timeout=0.1)
        assert is_hex(text_of(ask(http, COMPLETIONS, guided_regex=HEX)))
        wait_until_idle(http)


def test_while_all_compile_threads_are_stuck_others_are_told_to_come_back(tiny_path: Path) -> None:
    limits = ("--guided-decoding.num-compile-threads", "1")
    limits += ("--guided-decoding.compile-timeout-s", "0.1")
    with (
        start_server(str(tiny_path), "--max-model-len", "256", *limits) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        body = {"model": str(tiny_path)} | INPUTS[COMPLETIONS]
        slow = http.post(COMPLETIONS, json=body | {"guided_json": SLOW_SCHEMA})
        assert slow.status_code == 400
        assert "took longer to compile" in slow.json()["error"]["message"]
        other = http.post(COMPLETIONS, json=body | {"guided_regex": HEX})
        assert (other.status_code, other.headers["retry-after"]) == (503, "1")
        error = other.json()["error"]
        assert (error["code"], error["param"]) == ("unavailable", None)
        assert "all 1 threads that compile constraints are busy, 1 of them" in error["message"]
        assert http.get("/load").json()["num_stuck_compile_threads"] == 1
        assert "hotshoe:stuck_compile_threads{" in http.get("/metrics").text
        assert http.post(COMPLETIONS, json=body | {"max_tokens": 2}).status_code == 200
        while http.get("/load").json()["num_stuck_compile_threads"]:
            sleep(0.05)
        assert is_hex(text_of(ask(http, COMPLETIONS, guided_regex=HEX, model=str(tiny_path))))


# -- the official client ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


MESSAGES: Any = [{"role": "user", "content": "x"}]


def test_the_official_client_parses_answers_into_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Sky)
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.colour in ("blue", "grey")
    response = client.responses.parse(model="tiny", input="x", text_format=Sky)
    assert response.output_parsed is not None
    assert len(response.output_parsed.clouds) <= 2


def test_the_official_client_parses_streams_into_models(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Sky
    ) as chat:
        kinds = {event.type for event in chat}
        parsed = chat.get_final_completion().choices[0].message.parsed
    assert "content.done" in kinds
    assert isinstance(parsed, Sky)
    with client.responses.stream(model="tiny", input="x", text_format=Sky) as responses:
        for _ in responses:
            pass
        assert isinstance(responses.get_final_response().output_parsed, Sky)


def test_the_official_client_hears_of_an_answer_that_was_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Sky, max_tokens=3
        )
    assert cut.value.completion.choices[0].message.content
