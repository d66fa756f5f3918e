"""Bodies of requests, as clients send them. Every field that isn't here is unknown or, if it is in
``unsupported.py``, refused unless it says nothing.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

INT32_MAX = 2**31 - 1

_Fast = Field(fail_fast=True)
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], _Fast]
Texts = Annotated[list[str], _Fast]


def _few(limit: int, kinds: tuple[type, ...], words: str) -> AfterValidator:
    """Checks a mapping, up to its first bad entry: pydantic would list them all."""

    def check(mapping: dict[str, Any]) -> dict[str, Any]:
        if len(mapping) > limit:
            raise ValueError(f"expected at most {limit} entries, got {len(mapping)}")
        for key, value in mapping.items():
            if type(value) not in kinds or not _travels(value):
                raise ValueError(f"expected {words} at {key[:64]!r}")
        return mapping

    return AfterValidator(check)


def _travels(value: Any) -> bool:
    """Whether a value can be sent on: JSON has larger numbers than the engine's messages."""
    if isinstance(value, dict):
        return all(map(_travels, value.values()))
    if isinstance(value, list):
        return all(map(_travels, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)


Metadata = Annotated[
    dict[str, Any], _few(16, (str, int, float, bool), "a text, number, true or false")
]
Biases = Annotated[
    dict[str, Any],
    _few(4096, (int, float), "a number"),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Extras = Annotated[
    dict[str, Any],
    _few(
        64,
        (str, int, float, bool, list, dict, type(None)),
        "a value whose numbers have at most 64 bits",
    ),
]
Prompts = str | TokenIds | Texts | Annotated[list[TokenIds], _Fast]


def _told(low: float, high: float) -> Any:
    """A range for the reader of the schema; ``SamplingParams`` checks it, in its own words."""
    return Field(json_schema_extra={"minimum": low, "maximum": high})


Temperature = Annotated[float, _told(0, 100)]
Share = Annotated[float, _told(0, 1)]
Penalty = Annotated[float, _told(-2, 2)]


def _closed(schema: dict[str, Any]) -> None:
    """Other fields are taken in only to be named in an error."""
    schema["additionalProperties"] = False


class Fields(BaseModel):
    """Strict types, no infinities; what isn't known is kept for ``FieldChecker``.

    Attributes:
        is_open: whether unknown fields have a use.
    """

    is_open: ClassVar[bool] = False

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, json_schema_extra=_closed
    )


class ApiRequest(Fields):
    """What all requests have.

    Attributes:
        neutral: fields that OpenAI or others have, and the values that change nothing.
    """

    neutral: ClassVar[str] = "other"

    model: str | None = Field(
        default=None, description="One of the served names; left out: the first of them."
    )


class StreamOptions(Fields):
    """Options of a streamed response."""

    include_usage: bool | None = Field(
        default=None, description="Send a last chunk with the usage and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Send the usage so far with every chunk."
    )


def _json(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError(f"expected an object, or its JSON as a text, got {value!r:.100}")
    return value


Json = Annotated[
    Any,
    AfterValidator(_json),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]


class StructuredOutputsFields(Fields):
    """A constraint on the output: exactly one, and the backend that enforces it."""

    json_: Json | None = Field(
        default=None, alias="json", description="A JSON schema that the output is valid for."
    )
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: str | None = Field(default=None, description="Matches the whole output.")
    choice: Texts | None = Field(default=None, description="The output is one of these texts.")
    grammar: str | None = Field(default=None, description="In the backend's language.")
    structural_tag: Json | None = Field(
        default=None, description="Free text with constrained parts, in the backend's format."
    )
    backend: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A loaded backend; left out: the configured one."
    )


class JsonSchemaFormat(Fields):
    """The schema of a response format."""

    name: str | None = Field(default=None, description="For the client's own use.")
    description: str | None = Field(
        default=None, description="For the client's own use; the model doesn't see it."
    )
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None, description="Changes nothing: a schema is always enforced."
    )


class ResponseFormat(Fields):
    """A constraint in OpenAI's form; structural tags are an addition to it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = Field(default=None, description="Of a structural tag.")
    structures: Annotated[list[dict[str, Any]], _Fast] | None = Field(
        default=None, description="Of a structural tag in its older form."
    )
    triggers: Texts | None = Field(
        default=None, description="Of a structural tag in its older form."
    )


class TextFormat(Fields):
    """A constraint in the form of OpenAI's Responses API."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, description="For the client's own use.")
    description: str | None = Field(
        default=None, description="For the client's own use; the model doesn't see it."
    )
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None, description="Changes nothing: a schema is always enforced."
    )


class TextFields(Fields):
    """What is said of the text of a response."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ConstrainedRequest(ApiRequest):
    """What may have a constraint on its output."""

    structured_outputs: StructuredOutputsFields | None = None


class GenerateRequest(ConstrainedRequest):
    """What completions and chat completions have in common."""

    n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        default=None, description="Number of independent choices; 1 by default."
    )
    stream: bool | None = Field(default=None, description="Send events as the text grows.")
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = Field(default=None, description="0 is greedy; at most 100.")
    top_p: Share | None = Field(default=None, description="Above 0, at most 1.")
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        default=None, description="0 or -1: all tokens."
    )
    min_p: Share | None = Field(default=None, description="0 to 1.")
    repetition_penalty: Annotated[float, _told(0.01, 100)] | None = Field(
        default=None, description="0.01 to 100."
    )
    presence_penalty: Penalty | None = Field(default=None, description="-2 to 2.")
    frequency_penalty: Penalty | None = Field(default=None, description="-2 to 2.")
    logit_bias: Biases | None = Field(
        default=None, description="Added to logits, -100 to 100, by token id."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        default=None, description="The same seed draws the same tokens."
    )
    stop: str | Texts | None = Field(default=None, description="Texts that end the output.")
    stop_token_ids: TokenIds | None = Field(default=None, description="Tokens that end the output.")
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Keep the stop string or token in the text."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on after the model's end token.")
    min_tokens: Count | None = Field(
        default=None, description="Neither end token nor stop string before so many tokens."
    )
    bad_words: Texts | None = Field(default=None, description="Words that may not appear.")
    allowed_token_ids: TokenIds | None = Field(default=None, description="Only these tokens.")
    logits_processors: Texts | None = Field(
        default=None, description="Names of loaded logits processors to apply."
    )
    extra_args: Extras | None = Field(
        default=None, description="For third-party samplers and logits processors; at most 64."
    )
    prompt_logprobs: Count | None = Field(
        default=None, description="So many log probabilities per prompt token."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text; true by default."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        default=None, description="Keep only the last so many tokens of a prompt; -1: what fits."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=INT32_MAX)] | None = Field(
        default=None, description="For schedulers that look at it; lower runs first."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Only requests with an equal salt share cached prefixes."
    )
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, description="Becomes part of the response's id; need not be unique."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Send token ids of prompt and output, too."
    )
    metadata: Metadata | None = Field(
        default=None, description="Free values for schedulers; at most 16."
    )
    user: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Handed to schedulers as the metadata's user."
    )
    response_format: ResponseFormat | None = None
    guided_json: Json | None = Field(
        default=None, description="Older name of structured_outputs.json."
    )
    guided_json_object: bool | None = Field(
        default=None, description="Older name of structured_outputs.json_object."
    )
    guided_regex: str | None = Field(
        default=None, description="Older name of structured_outputs.regex."
    )
    guided_choice: Texts | None = Field(
        default=None, description="Older name of structured_outputs.choice."
    )
    guided_grammar: str | None = Field(
        default=None, description="Older name of structured_outputs.grammar."
    )
    guided_decoding_backend: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Older name of structured_outputs.backend."
    )


class CompletionRequest(GenerateRequest):
    """Body of ``POST /v1/completions``."""

    neutral: ClassVar[str] = "completions"

    prompt: Prompts = Field(
        description="A text, texts, token ids, or lists of token ids.", union_mode="left_to_right"
    )
    max_tokens: Count | None = Field(
        default=None, description="16 by default; 0 computes nothing but the prompt."
    )
    echo: bool | None = Field(default=None, description="Put the prompt before the output.")
    logprobs: Count | None = Field(
        default=None, description="Log probabilities of so many tokens per position."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Whether a text gets the tokenizer's begin token; true."
    )


class Message(Fields):
    """One message. Further fields are for the chat template."""

    is_open: ClassVar[bool] = True

    model_config = ConfigDict(json_schema_extra=None)

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[dict[str, Any]], _Fast] | None = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class TemplateFields(ApiRequest):
    """How a conversation becomes a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Open the assistant's turn; true unless continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message instead of answering it."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja source; refused unless server.client_chat_templates."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the chat template."
    )


class ChatRequest(GenerateRequest, TemplateFields):
    """Body of ``POST /v1/chat/completions``."""

    neutral: ClassVar[str] = "chat"

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        default=None, description="By default as many as fit."
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        default=None, description="Older name of max_completion_tokens."
    )
    logprobs: bool | None = Field(default=None, description="Send log probabilities.")
    top_logprobs: Count | None = Field(
        default=None, description="So many likely tokens per position; needs logprobs."
    )
    tools: Annotated[list[dict[str, Any]], _Fast] | None = Field(
        default=None, description="Functions that the model may call; at most 128."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None,
        description="'none', 'auto' (the default), 'required', or the function to call, as "
        "{'type': 'function', 'function': {'name': ...}}.",
        union_mode="left_to_right",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether there may be several calls; true by default."
    )


class TokenizeRequest(ApiRequest):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiRequest):
    """Body of ``POST /detokenize``."""

    tokens: TokenIds
    skip_special_tokens: bool | None = None


class ResponsesRequest(ConstrainedRequest):
    """Body of ``POST /v1/responses``: texts and function calls."""

    neutral: ClassVar[str] = "responses"

    input: str | Annotated[list[dict[str, Any]], _Fast] = Field(
        description="A text, or items: messages with text content, calls and their outputs.",
        union_mode="left_to_right",
    )
    instructions: str | None = Field(default=None, description="A system message before it.")
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        default=None, description="By default as many as fit."
    )
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    text: TextFields | None = None
    tools: Annotated[list[dict[str, Any]], _Fast] | None = Field(
        default=None, description="Functions that the model may call; at most 128."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None,
        description="'none', 'auto' (the default), 'required', or the function to call, as "
        "{'type': 'function', 'name': ...}.",
        union_mode="left_to_right",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether there may be several calls; true by default."
    )
    metadata: Metadata | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
