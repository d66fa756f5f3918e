"""Conversations with tools, as the chat template gets them, or as text where it knows no tools."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hotshoe.api import SamplingParams, Tool, ToolChoice
from hotshoe.config import load_config
from hotshoe.errors import ConfigError, PluginNotFoundError, RequestError
from hotshoe.server.openai.errors import ApiError
from hotshoe.server.openai.schemas import ChatRequest
from hotshoe.server.openai.tools import tool_use
from hotshoe.server.parsers import Parsers, check_parsers, load_parsers
from hotshoe.server.serve import serve
from hotshoe.testing.models import CHAT_TEMPLATE, write_tiny_checkpoint
from hotshoe.text.chat import render_chat
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer
from hotshoe_tool_parsers.hermes import Hermes

TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)
TOOL = Tool(name="f", description="Adds.", parameters={"type": "object"})
ARGUMENTS = '{"a": 1}'
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}},
            {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "3"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def tokenizer_of(folder: Path, template: str = CHAT_TEMPLATE) -> Tokenizer:
    return load_tokenizer(str(folder), chat_template=template)


def parsers_of(tokenizer: Tokenizer, **server: Any) -> Parsers:
    return load_parsers(load_config(None, overrides={"server": server}).config, tokenizer)


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], *tools: Tool) -> str:
    ids = render_chat(
        tokenizer,
        messages,
        tool_parser=parsers_of(tokenizer).tools,
        offered_tools=tools,
        add_generation_prompt=False,
    )
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_template_with_tools_gets_them_and_arguments_as_mappings(folder: Path) -> None:
    text = rendered(tokenizer_of(folder, TOOL_TEMPLATE), HISTORY, TOOL)
    assert text == (
        '{"name": "f", "description": "Adds.", "parameters": {"type": "object"}}\n'
        'user: add\nassistant: f({"a": 1})f({})\ntool: 2\ntool: 3\n'
    )


def test_arguments_that_are_no_json_reach_the_template_as_they_are(folder: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"a'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    text = rendered(tokenizer_of(folder, TOOL_TEMPLATE), messages)
    assert text == 'assistant: f("{\\"a")\n'


def test_a_template_without_tools_gets_texts(folder: Path) -> None:
    text = rendered(tokenizer_of(folder), HISTORY, TOOL)
    system, user, assistant, results = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nYou may call functions")
    assert '"name": "f", "description": "Adds."' in system
    assert user == "user\nadd<|im_end|>\n"
    assert assistant == (
        'assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
    )
    assert results == (
        "user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n"
    )


def test_tools_are_told_behind_the_system_prompt(folder: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    text = rendered(tokenizer_of(folder), messages, TOOL)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert text.count("<|im_start|>system") == 1


def test_results_in_the_middle_come_before_the_next_message(folder: Path) -> None:
    messages = [*HISTORY, {"role": "user", "content": "thanks"}]
    text = rendered(tokenizer_of(folder), messages)
    assert text.index("<tool_response>") < text.index("thanks")
    assert "You may call" not in text


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("x", "tool_calls: got str, allowed: a list of calls"),
        ([1], r"tool_calls\[0\].function: expected a name"),
        ([{"function": {"arguments": "{}"}}], r"tool_calls\[0\].function: expected a name"),
        ([{"function": {"name": "f", "arguments": 1}}], r"arguments: got int"),
    ],
)
def test_malformed_calls_are_refused(folder: Path, calls: Any, words: str) -> None:
    messages = [{"role": "assistant", "tool_calls": calls}]
    with pytest.raises(RequestError, match=words):
        rendered(tokenizer_of(folder), messages)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CHAT_TEMPLATE, "hermes"),
        (CHAT_TEMPLATE + "{# <tool_call> #}", "hermes"),
        (CHAT_TEMPLATE + "{# [TOOL_CALLS] #}", "mistral"),
        (CHAT_TEMPLATE + "{# <|python_tag|> #}", "llama3_json"),
        (CHAT_TEMPLATE + "{# [func_name1(params_name1=params_value1, ...)] #}", "pythonic"),
    ],
)
def test_the_chat_template_tells_the_tool_parser(
    folder: Path, template: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parsers = parsers_of(tokenizer_of(folder, template))
    assert f"hotshoe_tool_parsers.{name}" == type(parsers.tools).__module__
    assert f"server.tool_parser={name} (auto: the chat template has" in caplog.text
    assert parsers.call_id_length == (9 if name == "mistral" else None)


def test_reasoning_is_read_if_the_chat_template_has_its_tags(folder: Path) -> None:
    assert parsers_of(tokenizer_of(folder)).reasoning is None
    tokenizer = tokenizer_of(folder, CHAT_TEMPLATE + "{# </think> #}")
    assert parsers_of(tokenizer).reasoning is not None
    assert parsers_of(tokenizer, reasoning_parser={"name": None}).reasoning is None


def test_a_server_can_do_without_parsers(folder: Path) -> None:
    assert parsers_of(tokenizer_of(folder), tool_parser={"name": None}).tools is None


def test_a_named_parser_is_looked_for_before_anything_is_loaded() -> None:
    check_parsers(load_config(None, overrides={"server": {"tool_parser": "mistral"}}).config)
    wrong = load_config(None, overrides={"server": {"reasoning_parser": "think"}}).config
    with pytest.raises(PluginNotFoundError, match="did you mean 'think_tags'"):
        serve(wrong, print)
    option = {"tool_parser": {"name": "hermes", "options": {"tag": "x"}}}
    with pytest.raises(ConfigError, match=r"server\.tool_parser\.options\.tag"):
        serve(load_config(None, overrides={"server": option}).config, print)


def test_markers_that_are_special_tokens_are_kept_in_the_text(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(str(folder))
    known.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    known.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    plain, special = tokenizer_of(folder), tokenizer_of(tmp_path)
    mistral = {"tool_parser": "mistral", "reasoning_parser": "think_tags"}
    assert parsers_of(plain, **mistral).keeps_special_tokens == (False, False)
    assert parsers_of(special, **mistral).keeps_special_tokens == (True, False)
    assert parsers_of(special).keeps_special_tokens == (False, False)


def chat_request(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return ChatRequest.model_validate(body)


OFFER = [{"type": "function", "function": {"name": "f"}}]


def test_special_markers_stay_in_the_text_of_requests_that_are_read(folder: Path) -> None:
    tools = parsers_of(tokenizer_of(folder)).tools
    parsers = Parsers(tools=tools, keeps_special_tokens=(True, False))
    params = SamplingParams()
    reads = tool_use(parsers, chat_request(tools=OFFER), None)
    assert not reads.readable(params, None).skip_special_tokens
    for fields in ({}, {"tools": OFFER, "tool_choice": "none"}):
        assert tool_use(parsers, chat_request(**fields), None).readable(params, None) is params


def test_without_a_tool_parser_requests_with_tools_are_refused() -> None:
    with pytest.raises(ApiError, match=r"set server\.tool_parser\.name") as refused:
        tool_use(Parsers(), chat_request(tools=OFFER), None)
    assert refused.value.param == "tools"
    assert tool_use(Parsers(), chat_request(), None).choice is None


class SaysNothing(Hermes):
    """A parser of a format that has no constraint."""

    def constraint(self, choice: ToolChoice) -> None:
        return None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
    ],
)
def test_what_a_parser_cannot_constrain_is_refused(fields: dict[str, Any], param: str) -> None:
    use = tool_use(Parsers(tools=SaysNothing()), chat_request(**{"tools": OFFER} | fields), None)
    with pytest.raises(ApiError, match="can't enforce it") as refused:
        use.constraint("")
    assert refused.value.param == param
    free = tool_use(Parsers(tools=SaysNothing()), chat_request(tools=OFFER), None)
    assert free.constraint("") is None
