"""What a user gets back: request outputs with text, assembled from the engine's updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from hotshoe.api import PositionLogprobs, SamplingParams, TokenLogprob
from hotshoe.engine.request import EngineRequest, RequestMetrics, RequestUpdate
from hotshoe.text.stream import OutputText
from hotshoe.text.tokenizer import MissingTokenizer, Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    Attributes:
        index: which of the ``n`` choices.
        text: all text so far that is final: no half characters, nothing that may become a stop
            string.
        new_text: the part of it that came with the latest update.
        token_ids: output tokens; those after a stop string are not among them.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``; None = unfinished.
        stop_reason: the stop string or stop token id that ended it; None for EOS and lengths.
        seed: what its tokens were drawn with, the same for all choices of a prompt; given as
            ``SamplingParams.seed`` it brings them again, choice by choice.
        logprobs: one entry per output token, if asked for.
        error: what went wrong, if ``finish_reason`` is ``error``.
        metrics: times and counts, when finished.
        num_cached_tokens: prompt tokens that the prefix cache supplied; 0 until the first token.
        error_field: the sampling parameter that is at fault, if ``error`` is the request's own.
        is_unavailable: whether ``error`` is that it couldn't be served now; later it may.
    """

    index: int
    seed: int
    text: str = ""
    new_text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error_field: str | None = None
    is_unavailable: bool = False

    @property
    def cumulative_logprob(self) -> float | None:
        """Log probability of the whole output; None if logprobs were not asked for."""
        if self.logprobs is None:
            return None
        return sum(entry.token.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices.

    Attributes:
        prompt: the text, if it was given as text.
        prompt_logprobs: per prompt token, None for the first, if asked for.
        outputs: in the order of their index.
        finished: whether every choice has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens of the first choice that the prefix cache supplied."""
        return self.outputs[0].num_cached_tokens


@dataclass(frozen=True, slots=True)
class _Live:
    """What is collected for one engine request."""

    output: RequestOutput
    choice: CompletionOutput
    text: OutputText | None
    includes_stop: bool


class OutputProcessor:
    """Turns updates of the engine into ``RequestOutput`` objects: detokenizes, and looks for stop
    strings.

    One prompt with ``n`` choices is ``n`` engine requests, named ``<request_id>/<index>``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # built now, or it would add to the time to the first token of the first request
        _ = tokenizer.bytes_table
        self._token_texts: dict[int, str] = {}
        self._live: dict[str, _Live] = {}

    def split(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: dict[str, object] | None = None,
    ) -> list[EngineRequest]:
        """The engine requests of one prompt."""
        # the prompt is scored once
        unscored = msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            EngineRequest(
                request_id=f"{request_id}/{index}",
                prompt_token_ids=prompt_token_ids,
                sampling_params=unscored if index else params,
                seed=params.seed,
                choice_index=index,
                priority=priority,
                cache_salt=cache_salt,
                metadata=metadata or {},
            )
            for index in range(params.n)
        ]

    def start(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[EngineRequest],
        seeds: Sequence[int],
    ) -> RequestOutput:
        """Begin to collect; the engine has taken ``requests`` and reported ``seeds``."""
        prompt_token_ids = requests[0].prompt_token_ids
        outputs = [CompletionOutput(index, seed) for index, seed in enumerate(seeds)]
        output = RequestOutput(request_id, prompt, prompt_token_ids, outputs)
        for request, choice in zip(requests, outputs, strict=True):
            params = request.sampling_params
            if params.logprobs is not None:
                choice.logprobs = []
            text = None
            if params.detokenize:
                text = OutputText(self._tokenizer, params, prompt_token_ids)
            includes_stop = params.include_stop_str_in_output
            self._live[request.request_id] = _Live(output, choice, text, includes_stop)
        return output

    def process(self, updates: Iterable[RequestUpdate]) -> tuple[list[RequestOutput], list[str]]:
        """Apply updates.

        Returns:
            The outputs that changed, and ids of engine requests to abort because a stop string
            ended them.
        """
        changed: dict[int, RequestOutput] = {}
        stopped: list[str] = []
        for update in updates:
            entry = self._live.get(update.request_id)
            if entry is None:
                continue  # ended by a stop string while a step was in flight
            if update.finish_reason is not None:
                del self._live[update.request_id]
            if entry.choice.finish_reason is not None:
                # aborted because of its stop string, which was reported then
                entry.choice.metrics = update.metrics
                continue
            if id(entry.output) not in changed:
                changed[id(entry.output)] = entry.output
                for choice in entry.output.outputs:
                    choice.new_text = ""
            if self._apply(update, entry) and update.finish_reason is None:
                stopped.append(update.request_id)
        return list(changed.values()), stopped

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests whose updates are not wanted any more."""
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def _apply(self, update: RequestUpdate, live: _Live) -> bool:
        """Returns whether a stop string has ended the choice."""
        output, choice, text = live.output, live.choice, live.text
        choice.metrics = update.metrics
        if update.num_cached_tokens is not None:
            choice.num_cached_tokens = update.num_cached_tokens
        elif update.metrics is not None:
            choice.num_cached_tokens = update.metrics.num_cached_tokens
        if update.prompt_logprobs is not None:
            known = [entry for entry in update.prompt_logprobs if entry is not None]
            output.prompt_logprobs = [None, *self._decoded(known)]
        token_ids = update.new_token_ids
        stop: str | None = None
        if text is not None:
            stop, token_ids = _append(text, update, includes_stop=live.includes_stop)
        choice.token_ids += token_ids
        if update.logprobs is not None and choice.logprobs is not None:
            choice.logprobs += self._decoded(update.logprobs[: len(token_ids)])
        if stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", stop
        elif update.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_reason
            choice.error, choice.error_field = update.error, update.error_field
            choice.is_unavailable = update.is_unavailable
        if choice.finish_reason is not None:
            output.finished = all(one.finish_reason is not None for one in output.outputs)
        if text is not None:
            piece = text.delta()
            choice.new_text += piece
            choice.text += piece
        return stop is not None

    def _decoded(self, entries: Sequence[PositionLogprobs]) -> list[PositionLogprobs]:
        return [
            PositionLogprobs(self._named(entry.token), [self._named(one) for one in entry.top])
            for entry in entries
        ]

    def _named(self, token: TokenLogprob) -> TokenLogprob:
        if isinstance(self._tokenizer, MissingTokenizer):
            return token
        text = self._token_texts.get(token.token_id)
        if text is None:
            text = self._tokenizer.decode([token.token_id], skip_special_tokens=False)
            self._token_texts[token.token_id] = text
        return TokenLogprob(token.token_id, token.logprob, token.rank, text)


def _append(
    text: OutputText, update: RequestUpdate, *, includes_stop: bool
) -> tuple[str | None, list[int]]:
    """Feed an update's tokens; the stop string they completed, and the tokens up to it."""
    token_ids = update.new_token_ids
    # the token that ended the output is no text, unless the request wants to see it
    is_hidden = update.finish_reason == "stop" and not includes_stop
    match = text.append(token_ids[:-1] if is_hidden else token_ids)
    if match is not None:
        return match.stop, token_ids[: match.num_tokens]
    return (text.finish() if update.finish_reason is not None else None), token_ids
