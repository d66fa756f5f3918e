"""``SamplingParams``: everything a request may say about how its tokens are chosen and when it
ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hotshoe.errors import SamplingParamsError

MAX_SEED = 2**64 - 1


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output; exactly one field is set. Enforced by the configured
    guided-decoding backend.
    """

    json: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise SamplingParamsError("structured_outputs", given, "exactly one kind of constraint")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen. Immutable, validated when built, travels to the
    worker once.

    Attributes:
        n: number of independent choices, each with its own random stream.
        temperature: 0 is greedy decoding.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in ``(0, 1]``.
        min_p: drop tokens less probable than this times the most probable one, in ``[0, 1]``.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (Keskar et al.
            2019, arXiv:1909.05858).
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
