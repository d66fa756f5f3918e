"""``pythonic``: the whole answer is a Python list of calls, ``[get_weather(city="Oslo")]``, as
Llama 3.2, Llama 4 and others write them.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

from hotshoe.api import (
    Component,
    GrammarSpec,
    PluginOptions,
    RequestError,
    Tool,
    ToolCall,
    ToolCallStream,
    ToolChoice,
    ToolParser,
    ToolParserCapabilities,
    ToolParserContext,
    hookimpl,
)
from hotshoe_tool_parsers import tags
from hotshoe_tool_parsers.prompting import listed
from hotshoe_tool_parsers.reading import GrowingText, json_text

SEPARATOR = ", "
_CONSTANTS = {"true": True, "false": False, "null": None}
_KNOWN_KEYWORDS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "title",
        "description",
        "default",
        "examples",
    }
)
_ARGUMENT = re.compile(r"(?:, )?([^\W\d]\w*)=")

INSTRUCTIONS = """\
You may call functions to help with the user's question:
{tools}
To call functions, answer with nothing but a list in this form:
[function_name(argument_name="value"), other_function(argument_name=1)]
If no function helps, answer without one."""


class Pythonic(ToolParser):
    """An answer that begins like a list of calls is one, if it is whole; any other is text.

    Names of functions and arguments must be Python's. Where one function is strict, all are.
    """

    def stream(self, choice: ToolChoice, *, is_constrained: bool = False) -> ToolCallStream:
        return GrowingText(choice, partial(_read, is_constrained=is_constrained))

    def constraint(self, choice: ToolChoice) -> GrammarSpec:
        def tag(tool: Tool) -> tuple[str, tags.Format, str]:
            return f"{_checked(tool.name, 'name of a function')}(", _arguments(tool), ")"

        calls = tags.sequence(tags.const("["), tags.calls(choice, SEPARATOR, tag), tags.const("]"))
        return tags.spec(calls if choice.is_required else tags.text_or(calls, r"\["))

    def instructions(self, tools: Sequence[Tool]) -> str:
        return INSTRUCTIONS.format(tools=listed(tools))

    def write(self, calls: Sequence[ToolCall]) -> str:
        return f"[{SEPARATOR.join(map(_written, calls))}]"


def _written(call: ToolCall) -> str:
    arguments = [f"{name}={value!r}" for name, value in json.loads(call.arguments).items()]
    return f"{call.name}({', '.join(arguments)})"


def _checked(name: str, what: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RequestError(
            f"{name!r} can't be the {what} in the pythonic format, which writes Python; allowed: "
            "letters, digits and _, and no keyword"
        )
    return name


def _arguments(tool: Tool) -> tags.Format:
    """Required arguments, then optional ones, each once and in the schema's order."""
    schema = tool.parameters
    for word in schema:
        if word not in _KNOWN_KEYWORDS:
            raise RequestError(
                f"function {tool.name!r}: the pythonic format can't enforce {word!r} on the "
                f"arguments as a whole; allowed there: {', '.join(sorted(_KNOWN_KEYWORDS))}"
            )
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = [name for name in properties if name in schema.get("required", ())]
    missing = sorted(set(schema.get("required", ())) - set(properties))
    if missing:
        raise RequestError(
            f"function {tool.name!r}: argument {missing[0]!r} is required but not described"
        )
    optional = [name for name in properties if name not in required]
    values = {name: _argument(schema, name) for name in properties}
    parts = [part for name in required for part in (tags.const(", "), values[name])][1:]
    if required:
        parts += [_perhaps(tags.sequence(tags.const(", "), values[name])) for name in optional]
    elif optional:
        parts.append(_some_of([values[name] for name in optional]))
    return tags.sequence(*parts) if parts else tags.const("")


def _argument(schema: Mapping[str, Any], name: str) -> tags.Format:
    own = schema["properties"][name]
    if isinstance(own, Mapping):  # what it refers to is found from its own root
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        own = {**own, **shared}
    label = f"{_checked(name, 'name of an argument')}="
    return tags.sequence(tags.const(label), tags.json_format(own))


def _perhaps(part: tags.Format) -> tags.Format:
    return {"type": "optional", "content": part}


def _some_of(values: Sequence[tags.Format]) -> tags.Format:
    """Any of the values in order, with commas between those that are there."""
    cases = []
    for first, value in enumerate(values):
        rest = [_perhaps(tags.sequence(tags.const(", "), one)) for one in values[first + 1 :]]
        cases.append(tags.sequence(value, *rest))
    return _perhaps(tags.either(cases))


def _read(text: GrowingText, is_constrained: bool) -> Generator[None, None, None]:
    taken = yield from text.space()
    if (yield from text.is_at("[")):
        whole, is_whole = yield from _read_list(text)
        calls = None
        if is_whole:
            calls = _constrained_calls(whole) if is_constrained else _calls(whole)
        if calls and all(call.name in text.names for call in calls):
            for call in calls:
                text.tell_call(call.name, call.arguments)
        else:
            text.tell(taken + whole)
    else:
        text.tell(taken)
    yield from text.content_to_end()


def _read_list(text: GrowingText) -> Generator[None, None, tuple[str, bool]]:
    """Take a Python list; False if what is there can't become a list of calls."""
    taken: list[str] = []
    depth, quote, is_escaped = 0, "", False
    while (yield from text.more()):
        character = text.take()
        taken.append(character)
        if quote:
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == quote:
                quote = ""
            continue
        if len(taken) == 2 and not character.isidentifier():
            break  # a list of something else, or a footnote
        if character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return "".join(taken), True
    return "".join(taken), False


def _calls(written: str) -> list[ToolCall] | None:
    """The calls of a list; None if it holds anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in the model's strings
            tree = ast.parse(written, mode="eval").body
        if not isinstance(tree, ast.List):
            return None  # a comprehension
        return [_call(node) for node in tree.elts]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("arguments without a name")
        arguments[argument.arg] = _value(argument.value)
    return ToolCall(node.func.id, json_text(arguments))


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("JSON has only texts as keys")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError("JSON has no such value")
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        raise ValueError("JSON has no such number")
    return value


def _constrained_calls(written: str) -> list[ToolCall] | None:
    """The calls of a list that follows the constraint: its values are JSON."""
    try:
        return _json_calls(written)
    except (ValueError, RecursionError):
        return None


def _json_calls(written: str) -> list[ToolCall]:
    calls, place, decoder = [], 1, json.JSONDecoder()
    while place < len(written) and written[place] != "]":
        name, _, _ = written[place:].partition("(")
        place += len(name) + 1
        arguments = {}
        while (label := _ARGUMENT.match(written, place)) is not None:
            arguments[label[1]], place = decoder.raw_decode(written, label.end())
        calls.append(ToolCall(name, json_text(arguments)))
        place += 1  # the closing parenthesis
        if written.startswith(SEPARATOR, place):
            place += len(SEPARATOR)
    return calls


def build(options: PluginOptions, context: ToolParserContext) -> Pythonic:
    """The parser; it has no options."""
    return Pythonic()


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="tool_parser/0",
        factory=build,
        capabilities=ToolParserCapabilities(
            template_markers=("[func_name1(params_name1=params_value1",)
        ),
        auto_priority=1,
    )
