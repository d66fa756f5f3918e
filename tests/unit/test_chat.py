"""Conversations with tools, as the chat template gets them, or as text where it knows no tools."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hotshoe.api import Tool
from hotshoe.config import load_config
from hotshoe.errors import ConfigError, PluginNotFoundError, RequestError
from hotshoe.server.parsers import Parsers, check_parsers, load_parsers
from hotshoe.server.serve import serve
from hotshoe.testing.models import CHAT_TEMPLATE, write_tiny_checkpoint
from hotshoe.text.chat import render_chat
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer

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
