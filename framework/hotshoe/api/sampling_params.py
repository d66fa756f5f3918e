"""``SamplingParams``: everything a request may say about how its tokens are chosen and when it
ends.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from hotshoe.errors import SamplingParamsError

MAX_SEED = 2**64 - 1
MAX_CHOICES = 16_384
"""Most choices of one prompt: each is a request of its own to the engine."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output: exactly one field is set, besides ``backend``. A guided-decoding
    backend enforces all of it, or the request is refused.

    Attributes:
        json: a JSON schema, as text, as a mapping or as a pydantic model class; text when built.
        json_object: true for any JSON object.
        regex: a regular expression that the whole output matches.
        choice: texts of which the output is one.
        grammar: a grammar in the backend's language.
        structural_tag: free text with constrained parts in the backend's format, as JSON text or as
            a mapping; text when built.
        backend: name of a loaded backend; None = the configured one.
    """

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    backend: str | None = None

    def __post_init__(self) -> None:
        kinds = (name for name in self.__struct_fields__ if name != "backend")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise SamplingParamsError("structured_outputs", given, "exactly one kind of constraint")
        if self.backend is not None and (not isinstance(self.backend, str) or not self.backend):
            raise SamplingParamsError(
                "structured_outputs.backend", self.backend, "the name of a loaded backend, or None"
            )
        (name,) = given
        value = getattr(self, name)
        field = f"structured_outputs.{name}"
        if name == "json_object":
            if value is not True:
                raise SamplingParamsError(field, value, "true")
        elif name == "choice":
            choices = _texts(field, value)
            if not choices or isinstance(value, str):
                raise SamplingParamsError(field, value, "a list of at least one text")
            msgspec.structs.force_setattr(self, name, choices)
        elif name in ("json", "structural_tag") and not isinstance(value, str):
            msgspec.structs.force_setattr(self, name, _json_text(field, value))
        elif not isinstance(value, str) or not value:
            raise SamplingParamsError(field, value, "a text that is not empty")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen. Immutable, validated when built, travels to the
    worker once.

    Attributes:
        n: number of independent choices, each with its own random stream, at most 16384.
        temperature: 0 is greedy decoding, at most 100.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in ``(0, 1]``.
        min_p: drop tokens less probable than this times the most probable one, in ``[0, 1]``.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (Keskar et al.
            2019, arXiv:1909.05858), in ``[0.01, 100]``.
        presence_penalty: subtracted once from the logit of each token that the output holds, in
            ``[-2, 2]``.
        frequency_penalty: subtracted per occurrence in the output, in ``[-2, 2]``.
        logit_bias: added to the logits of these token ids, in ``[-100, 100]``.
        bad_words: texts that the output must not contain as tokenized words.
        bad_words_token_ids: the same as token sequences; the engine fills it in from ``bad_words``.
        allowed_token_ids: only these tokens may be sampled.
        max_tokens: most tokens to generate; None = up to ``max_model_len``.
        min_tokens: EOS and stop tokens are masked until so many tokens exist; stop strings are
            not looked for either.
        stop: texts that end the output.
        stop_token_ids: tokens that end the output.
        include_stop_str_in_output: whether the stop string stays in the text.
        ignore_eos: whether to go on after the EOS token.
        seed: one seed gives the same tokens whatever else runs; None = derived from the
            engine's seed.
        logprobs: log probabilities of so many most likely tokens per position besides the
            chosen one; -1 = all.
        prompt_logprobs: the same for prompt positions.
        skip_special_tokens: whether special tokens are left out of the text.
        detokenize: whether text is produced at all. Stop strings need it.
        logits_processors: names of loaded ``logits_processors`` plugins to apply to this request.
        structured_outputs: constraint on the output.
        extra_args: free values for third-party samplers and logits processors; the core does
            not read them.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check every field and bring sequences into tuples.

        Raises:
            SamplingParamsError: naming the first field that is out of range.
        """
        for name, check in _CHECKS.items():
            given = getattr(self, name)
            checked = check(name, given)
            if checked is not given:
                msgspec.structs.force_setattr(self, name, checked)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise SamplingParamsError("stop", self.stop, "none unless detokenize is true")


def check_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model has no logit for.

    Args:
        params: of one request.
        vocab_size: width of the logits.

    Raises:
        SamplingParamsError: naming the field and the first id that is too large.
    """
    ids_by_field: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "bad_words_token_ids": chain.from_iterable(params.bad_words_token_ids),
    }
    for name, token_ids in ids_by_field.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise SamplingParamsError(
                    name, token_id, f"token ids below {vocab_size}, the model's vocabulary size"
                )


_Check = Callable[[str, Any], Any]


def _integer(low: int, high: int | None = None) -> _Check:
    allowed = f"a whole number of at least {low}" if high is None else f"{low} to {high}"

    def check(name: str, value: Any) -> int:
        number = _as_int(name, value, allowed)
        if number < low or (high is not None and number > high):
            raise SamplingParamsError(name, value, allowed)
        return number

    return check


def _as_int(name: str, value: Any, allowed: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SamplingParamsError(name, value, allowed)
    try:
        return operator.index(value)
    except TypeError:
        raise SamplingParamsError(name, value, allowed) from None


def _real(allowed: str, is_allowed: Callable[[float], bool]) -> _Check:
    def check(name: str, value: Any) -> float:
        number = _as_float(name, value, allowed)
        if not is_allowed(number):
            raise SamplingParamsError(name, value, allowed)
        return number

    return check


def _as_float(name: str, value: Any, allowed: str) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise SamplingParamsError(name, value, allowed)
        try:
            value = float(value)
        except OverflowError:
            raise SamplingParamsError(name, value, allowed) from None
    if not math.isfinite(value):
        raise SamplingParamsError(name, value, allowed)
    return float(value)


def _optional(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _json_text(name: str, value: Any) -> str:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    elif not isinstance(value, Mapping):
        allowed = "JSON as a text that is not empty, as a mapping, or as a pydantic model class"
        raise SamplingParamsError(name, value, allowed)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingParamsError(name, value, f"what JSON can hold ({error})") from None


def _instance(kind: type) -> _Check:
    words = {bool: "true or false", str: "a text"}

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise SamplingParamsError(name, value, words.get(kind, f"a {kind.__name__}"))
        return value

    return check


def _items(name: str, value: Any, allowed: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Sequence):
        raise SamplingParamsError(name, value, allowed)
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    allowed = "texts, none of them empty"
    items = (value,) if isinstance(value, str) else tuple(_items(name, value, allowed))
    for item in items:
        if not isinstance(item, str) or not item:
            raise SamplingParamsError(name, value, allowed)
    return items


def _distinct_texts(name: str, value: Any) -> tuple[str, ...]:
    items = _texts(name, value)
    if len(set(items)) < len(items):
        raise SamplingParamsError(name, value, "each name once")
    return items


def _token_id(name: str, value: Any) -> int:
    token_id = _as_int(name, value, _TOKEN_IDS)
    if not 0 <= token_id <= _MAX_TOKEN_ID:
        raise SamplingParamsError(name, value, _TOKEN_IDS)
    return token_id


def _token_id_sequence(name: str, value: Any) -> tuple[int, ...]:
    items = tuple(_token_id(name, item) for item in _items(name, value, f"a list of {_TOKEN_IDS}"))
    return items


def _token_id_set(name: str, value: Any) -> tuple[int, ...]:
    items = _token_id_sequence(name, value)
    if len(set(items)) < len(items):
        raise SamplingParamsError(name, value, "each token id once")
    return items


def _nonempty_token_id_set(name: str, value: Any) -> tuple[int, ...]:
    items = _token_id_set(name, value)
    if not items:
        raise SamplingParamsError(name, value, "at least one token id, or null to allow all")
    return items


def _token_id_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    allowed = f"lists of {_TOKEN_IDS}, none of them empty"
    items = tuple(_token_id_sequence(name, item) for item in _items(name, value, allowed))
    if not all(items):
        raise SamplingParamsError(name, value, allowed)
    return items


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    allowed = f"a mapping of {_TOKEN_IDS} to numbers from -100 to 100"
    if not isinstance(value, Mapping):
        raise SamplingParamsError(name, value, allowed)
    checked = {}
    for key, bias in value.items():
        token_id = _token_id(name, key)
        number = _as_float(name, bias, allowed)
        if not -100 <= number <= 100:
            raise SamplingParamsError(name, bias, allowed)
        checked[token_id] = number
    return checked


def _extra_args(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SamplingParamsError(name, value, "a mapping with texts as keys")
    return value


_MAX_TOKEN_ID = 2**31 - 1
_TOKEN_IDS = "token ids, whole numbers of at least 0"
_PENALTY = _real("-2 to 2", lambda number: -2 <= number <= 2)
_FLAG = _instance(bool)
_NUM_LOGPROBS = _optional(_integer(-1))
_CHECKS: dict[str, _Check] = {
    "n": _integer(1, MAX_CHOICES),
    "temperature": _real("0 to 100", lambda number: 0 <= number <= 100),
    "top_k": _integer(-1),
    "top_p": _real("above 0, at most 1", lambda number: 0 < number <= 1),
    "min_p": _real("0 to 1", lambda number: 0 <= number <= 1),
    "repetition_penalty": _real("0.01 to 100", lambda number: 0.01 <= number <= 100),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": _optional(_logit_bias),
    "bad_words": _texts,
    "bad_words_token_ids": _token_id_sequences,
    "allowed_token_ids": _optional(_nonempty_token_id_set),
    "max_tokens": _optional(_integer(1)),
    "min_tokens": _integer(0),
    "stop": _texts,
    "stop_token_ids": _token_id_set,
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "seed": _optional(_integer(0, MAX_SEED)),
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "skip_special_tokens": _FLAG,
    "detokenize": _FLAG,
    "logits_processors": _distinct_texts,
    "structured_outputs": _optional(_instance(StructuredOutputs)),
    "extra_args": _optional(_extra_args),
}
