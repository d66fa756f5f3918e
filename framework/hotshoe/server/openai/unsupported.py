"""Fields of OpenAI's API, and of other servers, that are known here but do nothing yet: refused by
name, unless their value says that nothing is wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.schemas import ApiRequest, Fields

logger = logging.getLogger(__name__)

_OTHER: dict[str, tuple[Any, ...]] = {}
_GENERATE: dict[str, tuple[Any, ...]] = {
    "guided_whitespace_pattern": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "safety_identifier": (),
    "store": (False,),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "documents": ([],),
    "add_special_tokens": (False,),
    "mm_processor_kwargs": ({},),
}
_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "other": _OTHER,
    "completions": _GENERATE | {"suffix": ("",)},
    "chat": _GENERATE | _CHAT,
    "responses": _RESPONSES,
}
_MEMBERS: dict[str, tuple[Any, ...]] = {
    "stream_options.include_obfuscation": (False,),
    "structured_outputs.disable_additional_properties": (False,),
    "structured_outputs.disable_any_whitespace": (False,),
    "structured_outputs.disable_fallback": (False,),
    "structured_outputs.whitespace_pattern": (),
}
_MAX_REMEMBERED = 100
_MAX_NAMED = 5
_MAX_NAME_LENGTH = 80


class FieldChecker:
    """Refuses fields that would be ignored, or warns of them.

    Args:
        policy: ``server.unknown_fields``.
    """

    def __init__(self, policy: Literal["refuse", "warn"]) -> None:
        self._policy = policy
        self._warned: set[str] = set()

    def check(self, request: ApiRequest) -> list[str]:
        """Look at the fields that the schema doesn't have.

        Returns:
            Warnings for the client, fit for a header.

        Raises:
            ApiError: naming the first field that can't be honoured.
        """
        neutral = _NEUTRAL[request.neutral]
        unknown: list[str] = []
        for name, value in (request.model_extra or {}).items():
            if name in neutral:
                if value is not None and value not in neutral[name]:
                    raise _unsupported(name, value, neutral)
            elif name == "best_of" and request.neutral in ("completions", "chat"):
                self._check_best_of(value, getattr(request, "n", None) or 1)
            elif len(unknown) < _MAX_NAMED:
                unknown.append(name)
        for name in type(request).model_fields:
            unknown += [*_unknown_members(getattr(request, name), name)][:_MAX_NAMED]
        return self._unknown(unknown) if unknown else []

    @staticmethod
    def _check_best_of(value: Any, n: int) -> None:
        if value is not None and value != n:
            raise _unsupported("best_of", value, {"best_of": (n,)})

    def _unknown(self, names: list[str]) -> list[str]:
        shown = [ascii(name)[:_MAX_NAME_LENGTH] for name in names]
        if self._policy == "refuse":
            raise invalid(
                f"unknown field {shown[0]}; remove it, or set server.unknown_fields to 'warn'",
                param=names[0][:_MAX_NAME_LENGTH],
                code="unknown_parameter",
            )
        for name in shown:
            if name not in self._warned and len(self._warned) < _MAX_REMEMBERED:
                self._warned.add(name)
                logger.warning("requests have the unknown field %s, which is ignored", name)
        quoted = ", ".join(shown).replace("\\", "/").replace('"', "'")
        return [f'299 - "unknown fields were ignored: {quoted}"']


def _unknown_members(value: Any, path: str) -> Iterator[str]:
    """Paths of fields, however deep, that the schema doesn't have.

    Raises:
        ApiError: naming one that is known and can't be honoured.
    """
    if isinstance(value, list):
        # the others are no models either
        if value and isinstance(value[0], Fields):
            for index, one in enumerate(value):
                yield from _unknown_members(one, f"{path}.{index}")
    elif isinstance(value, Fields) and not value.is_open:
        for name, extra in (value.model_extra or {}).items():
            member = f"{path}.{name}"
            if member not in _MEMBERS:
                yield member
            elif extra is not None and extra not in _MEMBERS[member]:
                raise _unsupported(member, extra, _MEMBERS)
        for name, field in type(value).model_fields.items():
            yield from _unknown_members(getattr(value, name), f"{path}.{field.alias or name}")


def _unsupported(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> ApiError:
    allowed = " or ".join(repr(one) for one in (None, *neutral[name]))
    return invalid(
        f"{name}: is not supported yet, got {value!r:.100}; leave it out, or send "
        f"{allowed.replace('None', 'null')}",
        param=name,
        code="unsupported_parameter",
    )
