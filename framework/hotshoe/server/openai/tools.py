"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request: checked, shown to the model,
and enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from hotshoe.api import (
    GrammarSpec,
    SamplingParams,
    Tool,
    ToolChoice,
)
from hotshoe.errors import RequestError
from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.schemas import ChatRequest, ResponsesRequest
from hotshoe.server.openai.structured import Constraint
from hotshoe.server.parsers import Parsers
from hotshoe.text.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_DESCRIPTION_LENGTH = 16_384
PROMPT_END_TOKENS = 16
"""So many are enough to see whether a prompt opens the reasoning."""

_SCHEMA_PLACE = re.compile(r"format[\w.\[\]]*?\.json_schema\b")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse:
    """What one request says of tools, and what its output is read with.

    Attributes:
        choice: None if no calls are read.
        wanted: what the request wants of its answer; where that is a call, it's left out.
        is_constrained: whether the output must follow the parser's constraint, and nothing else.
    """

    def __init__(
        self, parsers: Parsers, choice: ToolChoice | None, wanted: Constraint | None
    ) -> None:
        self.parsers = parsers
        self.choice = choice
        self.wanted = wanted
        self.is_constrained = choice is not None and (
            choice.is_required
            or (
                wanted is None
                and (not choice.allows_parallel or any(tool.is_strict for tool in choice.tools))
            )
        )

    @property
    def field(self) -> str:
        """The parameter that asks for the constraint."""
        if self.choice is not None and self.choice.is_required:
            return "tool_choice"
        is_strict = any(tool.is_strict for tool in self.shown)
        return "tools" if is_strict else "parallel_tool_calls"

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the model is told of."""
        return self.choice.tools if self.choice else ()

    def constraint(self, prompt_end: str) -> Constraint | None:
        """What the output must follow to be what the parsers read.

        Args:
            prompt_end: the last characters of the prompt.

        Raises:
            ApiError: if it can't be enforced.
        """
        if self.is_constrained:
            constraint: Constraint | None = self._of_calls()
        elif self.choice is not None and self.wanted is not None:
            constraint = self._of_calls_or(self.choice, self.wanted)
        else:
            constraint = self.wanted
        if constraint is None or self.parsers.reasoning is None:
            return constraint
        spec = GrammarSpec.of(constraint.outputs)
        with _explained(constraint.param):
            moved = self.parsers.reasoning.constraint(spec, prompt_end)
        if moved is None:
            raise _refused(
                constraint.param,
                f"a {spec.kind!r} can't be enforced behind the model's reasoning; send another "
                "kind, or set server.reasoning_parser.name to none",
            )
        kind = _ToolConstraint if self.choice is not None else Constraint
        return _constraint(kind, moved, constraint.param, constraint.outputs.backend)

    def readable(self, params: SamplingParams, constraint: Constraint | None) -> SamplingParams:
        """Sampling that gives what the parsers read."""
        changes: dict[str, Any] = {}
        if constraint is not None:
            changes["structured_outputs"] = constraint.outputs
        keeps_for_calls, keeps_for_reasoning = self.parsers.keeps_special_tokens
        if keeps_for_reasoning or (self.choice is not None and keeps_for_calls):
            changes["skip_special_tokens"] = False
        return msgspec.structs.replace(params, **changes) if changes else params

    def _of_calls_or(self, choice: ToolChoice, wanted: Constraint) -> Constraint:
        """Either calls and nothing else, or an answer that is what the request wants."""
        free: dict[str, Any] = {"type": "object"}
        tools = [
            tool if tool.is_strict else replace(tool, parameters=free) for tool in choice.tools
        ]
        parser = self.parsers.tools
        assert parser is not None  # or there would be no choice
        with _explained(wanted.param):
            calls = parser.constraint(replace(choice, tools=tuple(tools), is_required=True))
            forms = [spec and spec.tag_format() for spec in (calls, GrammarSpec.of(wanted.outputs))]
        if None in forms:
            raise _refused(
                wanted.param,
                "can't be enforced beside calls in the format of this server's tool parser; send "
                "it alone, or tool_choice 'none'",
            )
        root = {"type": "or", "elements": forms}
        tag = json.dumps({"type": "structural_tag", "format": root}, ensure_ascii=False)
        spec = GrammarSpec(kind="structural_tag", value=tag)
        return _constraint(_ToolConstraint, spec, wanted.param, wanted.outputs.backend)

    def _of_calls(self) -> Constraint:
        choice, parser = self.choice, self.parsers.tools
        assert choice is not None  # or nothing would be constrained
        assert parser is not None  # or there would be no choice
        with _explained(self.field):
            spec = parser.constraint(choice)
        if spec is None:
            raise _refused(
                self.field,
                "the tool parser of this server can't enforce it; send tool_choice 'auto', "
                "functions that are not strict, and parallel_tool_calls true",
            )
        return _constraint(_ToolConstraint, spec, self.field, None)


def tool_use(
    parsers: Parsers, body: ChatRequest | ResponsesRequest, wanted: Constraint | None
) -> ToolUse:
    """What a request says of tools.

    Args:
        parsers: of the server.
        body: of the request.
        wanted: what it wants of its answer.

    Raises:
        ApiError: naming the field that is wrong.
    """
    is_flat = isinstance(body, ResponsesRequest)
    read, function = (_flat_tool, "") if is_flat else (_tool, ".function")
    tools = [read(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ())]
    if len(tools) > MAX_TOOLS:
        raise _bad("tools", f"got {len(tools)}, allowed: at most {MAX_TOOLS}")
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _bad(f"tools.{i}{function}.name", f"{name!r} is the name of another tool")
    mode, named = _mode(body.tool_choice, names, is_flat=is_flat)
    if not tools:
        if mode == "required":
            raise _bad("tool_choice", "is 'required' but there are no tools; send some")
        return ToolUse(parsers, None, wanted)
    if parsers.tools is None:
        raise invalid(
            "tools: this server reads no tool calls; leave them out, or set "
            "server.tool_parser.name",
            param="tools",
            code="unsupported_parameter",
        )
    if mode == "none":
        return ToolUse(parsers, None, wanted)
    if named is not None:
        tools = [tool for tool in tools if tool.name == named]
    choice = ToolChoice(
        tools=tuple(tools),
        is_required=mode == "required",
        # a named function is called once, as by OpenAI
        allows_parallel=body.parallel_tool_calls is not False and named is None,
    )
    return ToolUse(parsers, choice, wanted)


def prompt_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The last characters of a prompt, special tokens included."""
    return tokenizer.decode(token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)


def _mode(wanted: Any, names: list[str], *, is_flat: bool) -> tuple[str, str | None]:
    """``none``, ``auto`` or ``required``, and the function that is named."""
    if wanted is None:
        return "auto", None
    if isinstance(wanted, str):
        if wanted not in ("none", "auto", "required"):
            raise _bad_choice(wanted, is_flat)
        return wanted, None
    function = {key: value for key, value in wanted.items() if key != "type"}
    if not is_flat:
        function = function["function"] if set(function) == {"function"} else {}
    if (
        wanted.get("type") != "function"
        or not isinstance(function, dict)
        or set(function) != {"name"}
    ):
        raise _bad_choice(wanted, is_flat)
    if function["name"] not in names:
        known = ", ".join(map(repr, names)) or "none"
        where = "tool_choice.name" if is_flat else "tool_choice.function.name"
        raise _bad(where, f"no tool has the name {function['name']!r:.80}; tools: {known:.400}")
    return "required", function["name"]


def _bad_choice(wanted: Any, is_flat: bool) -> ApiError:
    form = "'name': ..." if is_flat else "'function': {'name': ...}"
    return _bad(
        "tool_choice",
        f"got {wanted!r:.200}, allowed: 'none', 'auto', 'required' or "
        f"{{'type': 'function', {form}}}",
    )


def _tool(tool: dict[str, Any], where: str) -> Tool:
    _check_type(tool, where)
    _check_known(tool, ("type", "function"), where)
    function = tool.get("function")
    where += ".function"
    if not isinstance(function, dict):
        raise _bad(where, "expected an object with name, description and parameters")
    return _function(function, where)


def _flat_tool(tool: dict[str, Any], where: str) -> Tool:
    """A tool of the Responses API, where functions are strict unless they say that they aren't."""
    _check_type(tool, where)
    function = {key: value for key, value in tool.items() if key != "type"}
    if function.get("strict") is None:
        function["strict"] = True
    return _function(function, where)


def _check_type(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise _bad(f"{where}.type", f"got {tool.get('type')!r:.80}, allowed: 'function'")


def _function(function: dict[str, Any], where: str) -> Tool:
    _check_known(function, ("name", "description", "parameters", "strict"), where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, '_' and '-'"
        raise _bad(f"{where}.name", f"got {name!r:.80}, allowed: {allowed}")
    if description is not None and not isinstance(description, str):
        raise _bad(f"{where}.description", f"got {description!r:.80}, allowed: a text")
    if len(description or "") > MAX_DESCRIPTION_LENGTH:
        length = len(description or "")
        allowed = f"at most {MAX_DESCRIPTION_LENGTH} characters"
        raise _bad(f"{where}.description", f"has {length} characters, allowed: {allowed}")
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise _bad(f"{where}.strict", f"got {strict!r:.80}, allowed: true or false")
    parameters = function.get("parameters")
    _check_schema(parameters, f"{where}.parameters")
    return Tool(
        name=name,
        description=description,
        parameters=_NO_ARGUMENTS if parameters is None else {"type": "object", **parameters},
        is_strict=bool(strict),
    )


def _check_schema(schema: Any, where: str) -> None:
    """As far as it must hold in any case; what remains is the grammar backend's to say."""
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise _bad(where, f"got {schema!r:.80}, allowed: a JSON schema of an object")
    if schema.get("type", "object") != "object":
        kind = schema["type"]
        raise _bad(f"{where}.type", f"got {kind!r:.80}, allowed: 'object', as arguments are one")
    if not isinstance(schema.get("properties", {}), dict):
        raise _bad(f"{where}.properties", "expected an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _bad(f"{where}.required", f"got {required!r:.80}, allowed: a list of texts")


def _check_known(given: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            allowed = ", ".join(known)
            raise invalid(
                f"{where}: unknown field {ascii(name)[:80]}; allowed: {allowed}",
                param=f"{where}.{name}"[:200],
                code="unknown_parameter",
            )


def _bad(where: str, message: str) -> ApiError:
    return invalid(f"{where}: {message}", param=where, code="invalid_value")


def _refused(param: str, message: str) -> ApiError:
    return invalid(f"{param}: {message}", param=param, code="unsupported_parameter")


@contextmanager
def _explained(param: str) -> Generator[None, None, None]:
    """Errors of a parser as errors of the parameter that it worked on."""
    try:
        yield
    except RequestError as error:
        raise _bad(param, str(error)) from error


class _ToolConstraint(Constraint):
    """Errors are about schemas of the client's, wherever they stand in the constraint."""

    def explained(self, message: str) -> ApiError:
        """What is said against it, once, with the schema's own place."""
        first, *others = _SCHEMA_PLACE.sub("parameters", message).split("; ")
        others = [one for one in dict.fromkeys(others) if not first.endswith(one)]
        return super().explained("; ".join([first, *others]))


def _constraint(
    kind: type[Constraint], spec: GrammarSpec, param: str, backend: str | None
) -> Constraint:
    value: Any = spec.value
    if spec.kind == "json_object":
        value = True
    elif spec.kind == "choice":
        value = json.loads(spec.value)
    return kind.of(spec.kind, value, param=param, backend=backend)
