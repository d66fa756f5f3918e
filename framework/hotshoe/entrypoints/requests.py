"""From what a caller says to what the engine takes: defaults, prompts and words as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import msgspec

from hotshoe.api import SamplingParams
from hotshoe.errors import ModelLoadError, RequestError, SamplingParamsError
from hotshoe.text.tokenizer import MissingTokenizer, Tokenizer

_FROM_GENERATION_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling_params(generation_config: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Sampling as a model's ``generation_config.json`` wants it, with changes."""
    found = {
        name: generation_config[name]
        for name in _FROM_GENERATION_CONFIG
        if generation_config.get(name) is not None
    }
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        return SamplingParams(**(found | changes))
    except SamplingParamsError as error:
        if error.field not in found or error.field in changes:
            raise
        raise ModelLoadError(
            f"the model's generation_config.json: {error}; correct it, or set "
            "model.use_generation_config to false"
        ) from error


def token_ids(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """A prompt's token ids.

    Raises:
        RequestError: if it is neither a text nor a list of ids.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    ids = plain_lists(prompt)
    if isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray):
        if all(type(one) is int for one in ids):
            return list(ids)
        if all(is_token_id(one) for one in ids):
            return [int(one) for one in ids]
    raise RequestError(f"a prompt is a text or a list of token ids, got {prompt!r:.100}")


def is_token_id(value: Any) -> bool:
    """Whether it is a whole number, of Python's or numpy's types."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain_lists(values: Any) -> Any:
    """Arrays and tensors as lists, anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def with_bad_words(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """Params whose ``bad_words`` are spelt out as token ids too."""
    if not params.bad_words:
        return params
    # a word is banned at the start of a text and after a space alike
    spellings = [spelling for word in params.bad_words for spelling in (word, f" {word.lstrip()}")]
    ids = {tuple(tokenizer.encode(one, add_special_tokens=False)) for one in spellings}
    ids |= set(params.bad_words_token_ids)
    return msgspec.structs.replace(params, bad_words_token_ids=tuple(sorted(ids)))


def check_tokenizer(tokenizer: Tokenizer, params: SamplingParams) -> None:
    """Refuse what takes a tokenizer where there is none.

    Raises:
        RequestError: naming the parameter.
    """
    if not isinstance(tokenizer, MissingTokenizer):
        return
    if params.structured_outputs is not None:
        raise tokenizer.refusal("structured_outputs can't be had")
    if params.detokenize:
        raise tokenizer.refusal("there is no text", "set detokenize to false")


def check_constraint(params: SamplingParams) -> None:
    """Refuse to go on after an output that is complete.

    Raises:
        SamplingParamsError: naming ``ignore_eos``.
    """
    if params.ignore_eos and params.structured_outputs is not None:
        # behind the end there is nothing that the constraint allows
        raise SamplingParamsError(
            "ignore_eos", True, "false with structured_outputs, which say where the output ends"
        )


def check_some_token_is_left(params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
    """Refuse a request whose own masks leave no token to begin with.

    Args:
        params: of the request, with ``bad_words_token_ids`` filled in.
        eos_token_ids: the model's.

    Raises:
        SamplingParamsError: naming ``allowed_token_ids``.
    """
    if params.allowed_token_ids is None:
        return
    masked = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens > 0:
        masked.update(params.stop_token_ids)
        masked.update(() if params.ignore_eos else eos_token_ids)
    if masked.issuperset(params.allowed_token_ids):
        raise SamplingParamsError(
            "allowed_token_ids",
            list(params.allowed_token_ids[:8]),
            "at least one token that neither bad_words nor, because of min_tokens, the end and "
            "stop tokens mask",
        )
