"""Tool calls and reasoning over HTTP, of a model that says what a script says, and of the embedded
one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from cli.command import ENVIRONMENT
from hotshoe.testing.models import IM_END
from hotshoe.testing.plugins import make_distribution
from hotshoe.testing.scripted_model import write_scripted_checkpoint
from server.command import RunningServer, start_server
from server.events import data_of, stream

PATH = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def tool(name: str, schema: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TOOLS = [tool("get_weather", SCHEMA, description="The weather of a city."), tool("get_time")]
SCHEMAS = {"get_weather": SCHEMA, "get_time": {"type": "object", "maxProperties": 0}}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}\n'
    "</tool_call>"
)
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
ARGUMENTS = {"city": "Oslo", "unit": "celsius"}
SCRIPTS = {
    "text": "It is warm.",
    "call": f"Let me see.\n{CALL}",
    "two": f"{CALL}\n{TIME_CALL}",
    "broken": '<tool_call>{"name": "get_weather", "arguments": {"city</tool_call> oh',
    "wrong": CALL.replace("celsius", "kelvin"),
    "thought": "<think>\nShort.\n</think>\n\nYes.",
    "thought call": f"<think>Short {TIME_CALL}</think>{CALL}",
    "json": '{"<tool_call>": "cold"}',
    "thought json": '<think>Free.</think>\n{"city": "Oslo", "unit": "celsius"}',
}


def says(name: str) -> list[dict[str, str]]:
    """The conversation in which the model says this."""
    return [{"role": "user", "content": chr(ord("A") + list(SCRIPTS).index(name))}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model that picks its script by the one letter that its prompt is."""
    root = tmp_path_factory.mktemp("scripted")
    site = make_distribution(
        root / "site",
        modules={},
        entry_points={"hotshoe.models": {"scripted": "hotshoe.testing.scripted_model"}},
    )
    scripts = [[*text.encode(), IM_END] for text in SCRIPTS.values()]
    turn = ord("A") % len(scripts)
    folder = write_scripted_checkpoint(root / "model", scripts[-turn:] + scripts[:-turn])
    flags = ("--model.name", "scripted", "--server.served-model-name", "scripted")
    # the tools are told in a system message, which this template leaves out
    template = ("--chat-template", "{{ messages[-1]['content'] }}")
    parser = ("--server.reasoning-parser", "think_tags")
    with pytest.MonkeyPatch.context() as patch:
        path = [str(site), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]
        patch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join(path))
        with start_server(str(folder), *flags, *template, *parser) as running:
            yield running


@pytest.fixture(scope="module")
def http(scripted: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


def ask(http: httpx.Client, name: str, **body: Any) -> dict[str, Any]:
    """The choice, which a stream of the same request must add up to."""
    body = {"messages": says(name), "tools": TOOLS, "temperature": 0, "max_tokens": 200, **body}
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    chunks = [chunk["choices"][0] for chunk in stream(http, PATH, **body)]
    assert added(chunk["delta"] for chunk in chunks) == without_ids(choice["message"])
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    found: dict[str, Any] = choice
    return found


def added(deltas: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream; checks its form on the way."""
    texts: dict[str, str | None] = {"content": None, "reasoning_content": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in texts:
            if delta.get(name) is not None:
                texts[name] = (texts[name] or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if call["index"] == len(calls):
                assert call["type"] == "function"
                assert call["id"]
                assert function["arguments"] == ""
                calls.append({"type": "function", "function": dict(function)})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"}
                assert set(function) == {"arguments"}
                calls[-1]["function"]["arguments"] += function["arguments"]
    return texts | {"tool_calls": calls}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
        "tool_calls": [{key: call[key] for key in ("type", "function")} for call in calls],
    }


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return [(name, json.loads(arguments)) for name, arguments in found]


def check_calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls, whose arguments follow their schemas."""
    calls = calls_of(choice)
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    return calls


def test_a_call_is_picked_out_of_the_text(http: httpx.Client) -> None:
    choice = ask(http, "call")
    assert choice["message"]["content"] == "Let me see."
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"


def test_calls_alone_leave_the_content_null(http: httpx.Client) -> None:
    choice = ask(http, "two")
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("get_weather", ARGUMENTS), ("get_time", {})]


def test_what_is_no_call_is_content(http: httpx.Client) -> None:
    for name in ("text", "broken"):
        choice = ask(http, name)
        assert choice["message"]["content"] == SCRIPTS[name]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("body", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_nothing_is_a_call(http: httpx.Client, body: dict[str, Any]) -> None:
    choice = ask(http, "call", **body)
    assert choice["message"]["content"] == SCRIPTS["call"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["broken", "wrong", "two"])
def test_required_calls_are_enforced_whatever_the_model_would_say(
    http: httpx.Client, name: str
) -> None:
    choice = ask(http, name, tool_choice="required", max_tokens=900)
    assert check_calls(choice)
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_a_named_function_is_called_once(http: httpx.Client, name: str) -> None:
    choice = ask(http, "two", tool_choice={"type": "function", "function": {"name": name}})
    assert [called for called, _ in check_calls(choice)] == [name]


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_there_is_one_call_without_parallel_calls(http: httpx.Client, tool_choice: str) -> None:
    choice = ask(http, "two", tool_choice=tool_choice, parallel_tool_calls=False)
    assert check_calls(choice) == [("get_weather", ARGUMENTS)]


def test_arguments_of_a_strict_function_follow_its_schema(http: httpx.Client) -> None:
    assert calls_of(ask(http, "wrong")) == [("get_weather", ARGUMENTS | {"unit": "kelvin"})]
    strict = [tool("get_weather", SCHEMA, strict=True)]
    assert len(check_calls(ask(http, "wrong", tools=strict))) == 1
    assert ask(http, "text", tools=strict)["message"]["content"] == SCRIPTS["text"]


def test_a_stream_with_tools_opens_without_content(http: httpx.Client) -> None:
    for name in ("two", "text"):
        chunks = stream(http, PATH, messages=says(name), tools=TOOLS, max_tokens=200)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    (plain, *_) = stream(http, PATH, messages=says("text"), max_tokens=200)
    assert plain["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("max_tokens", [5, 20, 60])
def test_a_required_call_that_is_cut_leaves_no_content(http: httpx.Client, max_tokens: int) -> None:
    choice = ask(http, "two", tool_choice="required", max_tokens=max_tokens)
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]


def test_a_schema_that_no_backend_enforces_is_refused_with_its_keyword(http: httpx.Client) -> None:
    tools = [tool("f", {"properties": {"a": {"not": {"type": "string"}}}})]
    body = {"messages": says("text"), "tools": tools, "tool_choice": "required"}
    error = http.post(PATH, json=body).json()["error"]
    assert error["param"] == "tool_choice"
    assert error["message"].count("parameters.properties.a.not") == 1, error


def test_log_probabilities_and_ids_of_tokens_come_once(http: httpx.Client) -> None:
    body = {"messages": says("call"), "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = http.post(PATH, json=body | {"max_tokens": 200}).json()["choices"][0]
    chunks = [one["choices"][0] for one in stream(http, PATH, **body, max_tokens=200)]
    ids = [token for chunk in chunks for token in chunk.get("token_ids", ())]
    assert ids == whole["token_ids"]
    entries = [e for chunk in chunks if chunk["logprobs"] for e in chunk["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]


def test_reasoning_comes_apart_from_the_answer(http: httpx.Client) -> None:
    message = ask(http, "thought")["message"]
    assert (message["reasoning_content"], message["content"]) == ("Short.", "Yes.")
    assert ask(http, "text")["message"]["reasoning_content"] is None


def test_calls_are_read_from_the_answer_and_not_from_the_reasoning(http: httpx.Client) -> None:
    for tool_choice in ("auto", "required"):
        choice = ask(http, "thought call", tool_choice=tool_choice, parallel_tool_calls=False)
        assert choice["message"]["reasoning_content"] == f"Short {TIME_CALL}"
        assert calls_of(choice) == [("get_weather", ARGUMENTS)]


def test_a_schema_holds_for_the_answer_and_leaves_the_reasoning_free(
    http: httpx.Client,
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    message = ask(http, "thought json", tools=None, response_format=wanted)["message"]
    assert message["reasoning_content"] == "Free."
    assert json.loads(message["content"]) == ARGUMENTS


WANTED = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"enum": ["warm", {"<tool_call>": "cold"}]}},
}


@pytest.mark.parametrize(
    ("name", "is_call"), [("two", True), ("wrong", True), ("text", False), ("json", False)]
)
def test_beside_tools_an_answer_is_what_is_wanted_or_calls(
    http: httpx.Client, name: str, is_call: bool
) -> None:
    choice = ask(http, name, response_format=WANTED, max_tokens=900)
    assert bool(calls_of(choice)) == is_call
    if is_call:
        assert not choice["message"]["content"]
    elif choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"]) in ("warm", {"<tool_call>": "cold"})
    required = ask(http, "two", tool_choice="required", response_format=WANTED, max_tokens=900)
    assert check_calls(required)


NAMED = {"type": "function", "function": {"name": "nobody"}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "'function'"),
    ({"tools": [TOOLS[0], {"type": "function"}]}, "tools.1.function", "expected an object"),
    ({"tools": [tool("a b")]}, "tools.0.function.name", "letters, digits"),
    ({"tools": [tool("x" * 65)]}, "tools.0.function.name", "1 to 64"),
    ({"tools": [tool("f"), tool("f")]}, "tools.1.function.name", "another tool"),
    ({"tools": [tool("f", [])]}, "tools.0.function.parameters", "JSON schema"),
    ({"tools": [tool("f", {"type": "array"})]}, "tools.0.function.parameters.type", "'object'"),
    ({"tools": [tool("f", {"required": "a"})]}, "tools.0.function.parameters.required", "a list"),
    ({"tools": [tool("f", {"properties": 1})]}, "tools.0.function.parameters.properties", "schem"),
    ({"tools": [tool("f", strict="yes")]}, "tools.0.function.strict", "true or false"),
    ({"tools": [tool("f", description=1)]}, "tools.0.function.description", "a text"),
    ({"tools": [tool("f", cache=1)]}, "tools.0.function.cache", "unknown field"),
    ({"tools": [TOOLS[0] | {"x": 1}]}, "tools.0.x", "unknown field"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
    ({"tool_choice": "always"}, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "'required'"),
    ({"tool_choice": NAMED}, "tool_choice.function.name", "'get_weather', 'get_time'"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": 1}, "tool_choice", ""),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "beside calls"),
    (
        {"tools": [tool("f", {"properties": {"a": {"type": "no"}}})], "tool_choice": "required"},
        "tool_choice",
        "",
    ),
    ({"chat_template_kwargs": {"tool_parser": 1}}, "chat_template_kwargs", "can't be set"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_wrong_with_tools_is_named(
    http: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    response = http.post(PATH, json={"messages": says("text"), "tools": TOOLS} | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert ask(http, "text")["message"]["content"] == SCRIPTS["text"]


def test_a_grammar_that_has_no_place_behind_reasoning_is_refused(http: httpx.Client) -> None:
    body = {"messages": says("text"), "structured_outputs": {"grammar": 'root ::= "a"'}}
    response = http.post(PATH, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "structured_outputs.grammar"
    assert "behind the model's reasoning" in error["message"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


def test_the_clients_tool_helpers_understand_the_answers(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    body: dict[str, Any] = {"model": "scripted", "messages": says("call"), "tools": tools}
    parsed = client.chat.completions.parse(**body).choices[0].message
    assert parsed.content == "Let me see."
    assert parsed.tool_calls[0].function.parsed_arguments == GetWeather(**ARGUMENTS)
    body |= {"messages": says("two"), "temperature": 0}
    with client.chat.completions.stream(**body, tool_choice="required") as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(final.message.tool_calls[0].function.parsed_arguments, GetWeather)
    assert final.finish_reason == "tool_calls"


# -- the Responses API ------------------------------------------------------------------------

RESPONSES = "/v1/responses"


def flat(tools: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Tools as the Responses API has them; strict, unless said otherwise."""
    return [{"type": "function", **one["function"], **more} for one in tools]


FREE = flat(TOOLS, strict=False)
DELTAS = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "text",
    "response.function_call_arguments.delta": "arguments",
}


def items_of(http: httpx.Client, name: str, **body: Any) -> list[dict[str, Any]]:
    """The items of a response, which the events of a stream must add up to."""
    body = {"input": says(name), "tools": FREE, "temperature": 0, "max_output_tokens": 200, **body}
    response = http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    items: list[dict[str, Any]] = response.json()["output"]
    with http.stream("POST", RESPONSES, json=body | {"stream": True}) as response:
        events = [json.loads(one) for one in data_of(response)]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    told = added_items(events[2:-1])
    assert told == events[-1]["response"]["output"]
    assert [*map(without_item_ids, told)] == [*map(without_item_ids, items)]
    return items


def added_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of the events of items; checks their form on the way."""
    items: list[dict[str, Any]] = []
    grown = ""
    for event in events:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items)
            assert event["item"]["status"] == "in_progress"
            grown = ""
        elif kind in DELTAS:
            grown += event["delta"]
        elif kind == "response.output_item.done":
            items.append(event["item"])
            assert index == len(items) - 1
        elif kind.endswith("_text.done") or kind == "response.function_call_arguments.done":
            assert grown == event.get("text", event.get("arguments"))
    return items


def without_item_ids(item: dict[str, Any]) -> dict[str, Any]:
    assert item["id"]
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def shapes(items: list[dict[str, Any]]) -> list[Any]:
    """The kinds of items, and what they say."""
    return [
        (one["name"], json.loads(one["arguments"]))
        if one["type"] == "function_call"
        else (one["type"], one["content"][0]["text"])
        for one in items
    ]


def test_calls_are_items_of_a_response(http: httpx.Client) -> None:
    assert shapes(items_of(http, "call")) == [
        ("message", "Let me see."),
        ("get_weather", ARGUMENTS),
    ]
    two = items_of(http, "two")
    assert shapes(two) == [("get_weather", ARGUMENTS), ("get_time", {})]
    assert {one["status"] for one in two} == {"completed"}
    assert len({one["call_id"] for one in two} | {one["id"] for one in two}) == 4
    assert shapes(items_of(http, "broken")) == [("message", SCRIPTS["broken"])]
    assert shapes(items_of(http, "two", tool_choice="none")) == [("message", SCRIPTS["two"])]


def test_reasoning_is_an_item_before_the_answer(http: httpx.Client) -> None:
    assert shapes(items_of(http, "thought", tools=None)) == [
        ("reasoning", "Short."),
        ("message", "Yes."),
    ]
    assert shapes(items_of(http, "thought call")) == [
        ("reasoning", f"Short {TIME_CALL}"),
        ("get_weather", ARGUMENTS),
    ]


def test_functions_of_a_response_are_strict_unless_they_say_otherwise(http: httpx.Client) -> None:
    ((_, free),) = shapes(items_of(http, "wrong"))
    assert free == ARGUMENTS | {"unit": "kelvin"}
    ((_, strict),) = shapes(items_of(http, "wrong", tools=flat(TOOLS)))
    jsonschema.validate(strict, SCHEMA)
    body = {"input": says("text"), "tools": flat([tool("f", {"not": {}}), *TOOLS])}
    error = http.post(RESPONSES, json=body).json()["error"]
    assert error["param"] == "tools"
    assert "parameters.not" in error["message"]
    told = http.post(RESPONSES, json=body | {"tools": flat(TOOLS)}).json()
    assert [one["strict"] for one in told["tools"]] == [True, True]
    assert (told["tool_choice"], told["parallel_tool_calls"]) == ("auto", True)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "get_time"}), ({"type": "function", "name": "get_time"}, None)],
)
def test_required_calls_are_enforced_in_a_response(
    http: httpx.Client, choice: Any, names: set[str] | None
) -> None:
    found = items_of(http, "two", tool_choice=choice, max_output_tokens=900)
    assert {one["type"] for one in found} == {"function_call"}
    for one in found:
        jsonschema.validate(json.loads(one["arguments"]), SCHEMAS[one["name"]])
    assert {one["name"] for one in found} == (names or {"get_time"})
    cut = items_of(http, "two", tool_choice="required", max_output_tokens=30)
    assert cut[-1]["status"] == "incomplete"


BAD_ITEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
    ({"tools": TOOLS}, "tools.0", "unknown field 'function'"),
    ({"tools": [*FREE, FREE[0]]}, "tools.2.name", "another tool"),
    ({"tool_choice": NAMED}, "tool_choice", "'name': ..."),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "'get_weather'"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "'required'"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name", "got None"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        "input.0.call_id",
        "no function_call before it has 'a'",
    ),
    ({"input": [{"type": "computer_call"}]}, "input.0", "'function_call_output'"),
    ({"max_tool_calls": 1}, "max_tool_calls", "not supported yet"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD_ITEMS, ids=[one[1] for one in BAD_ITEMS])
def test_what_is_wrong_with_the_tools_of_a_response_is_named(
    http: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    response = http.post(RESPONSES, json={"input": says("text"), "tools": FREE} | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert words in error["message"]


def test_the_clients_response_helpers_understand_calls(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    body: dict[str, Any] = {"model": "scripted", "tools": tools, "temperature": 0}
    parsed = client.responses.parse(**body, input=says("call"))
    assert parsed.output_text == "Let me see."
    (call,) = (one for one in parsed.output if one.type == "function_call")
    assert call.parsed_arguments == GetWeather(**ARGUMENTS)
    with client.responses.stream(
        **body, input=says("two"), tool_choice="required", max_output_tokens=900
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    assert all(isinstance(one.parsed_arguments, GetWeather) for one in final.output)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    told = client.responses.parse(
        **body, input=[*says("call"), *parsed.output, result, *says("text")]
    )
    assert told.output_text == SCRIPTS["text"]


@pytest.fixture(scope="module")
def embedded() -> Iterator[openai.OpenAI]:
    """A client of the embedded model."""
    with (
        start_server("embedded", "--max-model-len", "2048") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as one,
    ):
        yield one


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_time"}}]
)
def test_the_embedded_model_calls_when_it_must_and_answers_with_the_result(
    embedded: openai.OpenAI, tool_choice: Any
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body: dict[str, Any] = {"model": "embedded", "tools": TOOLS, "seed": 1}
    answer = embedded.chat.completions.create(
        **body,
        messages=messages,
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        temperature=1,
        n=10,
        max_tokens=120,
    )
    assert len(answer.choices) == 10
    for choice in answer.choices:
        assert len(check_calls(choice.model_dump())) == 1
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    told = embedded.chat.completions.create(
        **body, messages=[*messages, message, result], max_tokens=16, temperature=0
    )
    assert told.choices[0].message.content


def test_the_embedded_model_is_told_what_came_of_its_calls_in_a_response(
    embedded: openai.OpenAI,
) -> None:
    first: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body: dict[str, Any] = {"model": "embedded", "tools": flat(TOOLS), "temperature": 0}
    answer = embedded.responses.create(
        **body, input=first, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    told = embedded.responses.create(
        **body, input=[*first, call, result], max_output_tokens=16, tool_choice="none"
    )
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *first,
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "12 degrees"},
    ]
    same = embedded.chat.completions.create(
        model="embedded", messages=messages, max_tokens=16, temperature=0
    )
    assert told.output_text == same.choices[0].message.content
    assert told.usage.input_tokens == same.usage.prompt_tokens
