"""A ``tokenizers`` object from the vocabulary, merges and settings in a GGUF header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from hotshoe.errors import ModelLoadError

# Kinds in ``tokenizer.ggml.token_type``.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_SPACE = "\u2581"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", *_LLAMA3_NAMES)


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a GGUF header describes.

    Args:
        metadata: the header.
        source: what to call the model in error messages.

    Raises:
        ModelLoadError: if the header has no tokenizer, or one of an unsupported kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _build_byte_level(metadata, source)
    elif kind == "llama":
        tokenizer = _build_sentencepiece(metadata, source)
    else:
        raise ModelLoadError(
            f"model {source!r} has a tokenizer of kind {kind!r}; supported in GGUF: 'gpt2', "
            "'llama'; name a Hugging Face tokenizer instead (model.tokenizer)"
        )
    _add_special_tokens(tokenizer, metadata, source)
    _add_post_processor(tokenizer, metadata, source)
    return tokenizer


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """Text of the ``bos``, ``eos``, ``unknown`` or ``padding`` token."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    if token_id is None or token_id >= len(tokens):
        return None
    token: str = tokens[token_id]
    return token


def _array(metadata: Mapping[str, Any], key: str, source: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values:
        raise ModelLoadError(f"model {source!r}: GGUF header has no tokenizer.ggml.{key}")
    return values


def _vocabulary(metadata: Mapping[str, Any], source: str) -> dict[str, int]:
    tokens = _array(metadata, "tokens", source)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError(f"model {source!r}: a token appears twice in its GGUF vocabulary")
    return vocabulary


def _build_byte_level(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "")
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"model {source!r} splits text the {pre!r} way (tokenizer.ggml.pre); supported in "
            f"GGUF: {', '.join(_PRE_TOKENIZERS)}; name a Hugging Face tokenizer instead "
            "(model.tokenizer)"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges", source)]
    try:
        model = BPE(
            vocab=_vocabulary(metadata, source),
            merges=merges,
            ignore_merges=pre in _LLAMA3_NAMES,
        )
    except Exception as error:  # the library raises bare exceptions for unusable merges
        raise ModelLoadError(f"model {source!r}: its GGUF merges are damaged: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    pattern = _QWEN2_PATTERN if pre == "qwen2" else _LLAMA3_PATTERN
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _build_sentencepiece(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    vocabulary = _vocabulary(metadata, source)
    scores = _array(metadata, "scores", source)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=special_token(metadata, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: it merges the pair whose result has the best score."""
    merges: list[tuple[float, tuple[str, str]]] = []
    for token, token_id in vocabulary.items():
        splits = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        splits.sort(key=lambda split: (vocabulary[split[0]], vocabulary[split[1]]))
        merges.extend((scores[token_id], split) for split in splits)
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [split for _, split in merges]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], source: str) -> None:
    tokens = _array(metadata, "tokens", source)
    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, normalized=False, special=token_type != USER_DEFINED)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any], source: str) -> None:
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    is_llama3 = metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece or is_llama3)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = _required_special(metadata, "bos", source) if add_bos else None
    after = _required_special(metadata, "eos", source) if add_eos else None
    if before is None and after is None:
        return
    around = [token for token in (before, after) if token is not None]
    prefix, suffix = [before] if before else [], [after] if after else []
    tokenizer.post_processor = TemplateProcessing(
        single=[*prefix, "$A", *suffix],
        pair=[*prefix, "$A", *suffix, *prefix, "$B:1", *suffix],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
    )


def _required_special(metadata: Mapping[str, Any], name: str, source: str) -> str:
    token = special_token(metadata, name)
    if token is None:
        raise ModelLoadError(
            f"model {source!r}: its tokenizer adds a {name} token, but the GGUF header names none"
        )
    return token
