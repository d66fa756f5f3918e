"""From a request's fields to ``SamplingParams``."""

from __future__ import annotations

from typing import Any

from hotshoe.api import SamplingParams
from hotshoe.api.sampling_params import MAX_SEED
from hotshoe.config.schema import ServerConfig
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ResponsesRequest,
)
from hotshoe.server.openai.structured import Constraint

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOP_LENGTH = 1000
MAX_TOKEN_LISTS = 4096

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "extra_args",
    "prompt_logprobs",
    "skip_special_tokens",
)


def completion_params(
    llm: AsyncLLM,
    limits: ServerConfig,
    request: CompletionRequest,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Sampling for ``/v1/completions``. ``max_tokens`` 0 computes one token, which isn't shown.

    Raises:
        HotshoeError, ApiError: if a field is out of range.
    """
    _check_logprobs("logprobs", request.logprobs, limits)
    changes = _shared(request, limits, constraint)
    wanted = request.max_tokens
    if wanted == 0 and request.min_tokens:
        raise invalid(
            f"min_tokens: got {request.min_tokens}, allowed: at most max_tokens, which is 0",
            param="min_tokens",
            code="invalid_value",
        )
    changes["max_tokens"] = DEFAULT_COMPLETION_TOKENS if wanted is None else max(wanted, 1)
    changes["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        changes["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return llm.default_sampling_params(**changes)


def chat_params(
    llm: AsyncLLM,
    limits: ServerConfig,
    request: ChatRequest,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Sampling for ``/v1/chat/completions``.

    Raises:
        HotshoeError, ApiError: if a field is out of range, or fields contradict each other.
    """
    changes = _shared(request, limits, constraint)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid(
            f"max_tokens is {request.max_tokens} and max_completion_tokens is "
            f"{request.max_completion_tokens}, but they are one setting; send the second only",
            param="max_tokens",
            code="invalid_value",
        )
    changes["max_tokens"] = request.max_completion_tokens or request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid(
            f"top_logprobs is {request.top_logprobs} but logprobs is not true; set it",
            param="top_logprobs",
            code="invalid_value",
        )
    _check_logprobs("top_logprobs", request.top_logprobs, limits)
    changes["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return llm.default_sampling_params(**changes)


def responses_params(
    llm: AsyncLLM, request: ResponsesRequest, constraint: Constraint | None = None
) -> SamplingParams:
    """Sampling for ``/v1/responses``.

    Raises:
        HotshoeError: if a field is out of range.
    """
    changes = _given(request, ("temperature", "top_p", "top_k"))
    changes["max_tokens"] = request.max_output_tokens
    changes["structured_outputs"] = constraint and constraint.outputs
    if request.seed is not None:
        changes["seed"] = request.seed & MAX_SEED
    return llm.default_sampling_params(**changes)


def metadata_of(request: GenerateRequest | ResponsesRequest) -> dict[str, Any]:
    """What schedulers get to know: the request's metadata, and its user.

    Raises:
        ApiError: if there is too much text in it, or it names two users.
    """
    metadata: dict[str, Any] = dict(request.metadata or {})
    if any(len(key) > 64 or len(str(value)) > 512 for key, value in metadata.items()):
        raise invalid(
            "metadata: keys may have 64 characters and values 512",
            param="metadata",
            code="invalid_value",
        )
    user = request.user
    if user is not None and metadata.setdefault("user", user) != user:
        raise invalid(
            f"user is {user!r} but metadata.user is {metadata['user']!r}; send one",
            param="user",
            code="invalid_value",
        )
    return metadata


def _given(request: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(request, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _shared(
    request: GenerateRequest, limits: ServerConfig, constraint: Constraint | None
) -> dict[str, Any]:
    changes = _given(request, _SAME_NAME)
    changes["structured_outputs"] = constraint and constraint.outputs
    if request.n is not None and request.n > limits.max_choices:
        raise _too_many("n", request.n, limits.max_choices)
    _check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
    _check_stop(request, limits)
    for name in ("stop_token_ids", "bad_words"):
        if len(getattr(request, name) or ()) > MAX_TOKEN_LISTS:
            raise _too_many(name, len(getattr(request, name)), MAX_TOKEN_LISTS)
    if request.logit_bias:
        changes["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    if request.seed is not None:
        changes["seed"] = request.seed & MAX_SEED
    return changes


def _check_stop(request: GenerateRequest, limits: ServerConfig) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.max_stop:
        raise _too_many("stop", len(stops), limits.max_stop)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_LENGTH:
        raise invalid(
            f"stop: got a text of {longest} characters, allowed: at most {MAX_STOP_LENGTH}",
            param="stop",
            code="invalid_value",
        )


def _check_logprobs(name: str, value: int | None, limits: ServerConfig) -> None:
    if value is not None and value > limits.max_logprobs:
        raise invalid(
            f"{name}: got {value}, allowed: at most server.max_logprobs, {limits.max_logprobs}",
            param=name,
            code="invalid_value",
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise invalid(
            f"logit_bias: got the key {key!r:.100}, allowed: token ids",
            param="logit_bias",
            code="invalid_value",
        )
    return int(key)


def _too_many(name: str, number: int, limit: int) -> ApiError:
    return invalid(
        f"{name}: got {number}, allowed: at most {limit}", param=name, code="invalid_value"
    )
