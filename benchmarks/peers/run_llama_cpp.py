"""Driver of llama.cpp through ``llama-cpp-python``, started by ``compare.py``.

One request runs through ``Llama.generate``. The package has no continuous batching, so several are
decoded together through its low-level interface, with a common prefix computed once and copied.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

from protocol import Engine, Job, Outcome, Settings, Timing, UnsupportedError, main, unknown_variant

BATCH_TOKENS = 2048
Item = tuple[int, int, int, bool]
"""Token, its position, its sequence, and whether its logits are wanted."""


class LlamaCpp(Engine):
    """A model from a GGUF file, as it is."""

    def __init__(self, settings: Settings) -> None:
        if settings.variant != "q4_1":
            unknown_variant(settings, "q4_1")
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._api = llama_cpp
        self._settings = {
            "n_ctx": settings.max_model_len,
            "n_threads": settings.num_threads,
            "n_threads_batch": settings.num_threads,
            "n_batch": BATCH_TOKENS,
            "n_ubatch": 512,
        }
        drafts = None
        if settings.drafts:
            drafts = LlamaPromptLookupDecoding(
                num_pred_tokens=settings.num_draft_tokens, max_ngram_size=settings.max_ngram
            )
        self._llama = llama_cpp.Llama(
            settings.models["gguf"], verbose=False, draft_model=drafts, **self._settings
        )
        self._drafts = drafts is not None

    def describe(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("llama-cpp-python"),
            "settings": {**self._settings, "drafts": self._drafts},
            "system": self._api.llama_print_system_info().decode(),
        }

    def run(self, job: Job) -> Outcome:
        if job.keep_cache:
            raise UnsupportedError("no prefix cache between calls of several sequences")
        if len(job.prompts) == 1:
            return self._run_one(job)
        if not job.ignore_eos:
            raise UnsupportedError("no constrained output of several requests at once")
        return self._run_batch(job)

    def _run_one(self, job: Job) -> Outcome:
        grammar = None
        stamps: list[float] = []
        self._llama.reset()
        self._llama._ctx.kv_cache_clear()
        started = time.perf_counter()
        if job.regex is not None:
            raise UnsupportedError("no regular expressions")
        if job.json_schema is not None:
            grammar = self._api.LlamaGrammar.from_json_schema(job.json_schema, verbose=False)
        eos = self._llama.token_eos()
        for token in self._llama.generate(
            job.prompts[0], temp=0.0, top_k=1, repeat_penalty=1.0, grammar=grammar
        ):
            stamps.append(time.perf_counter() - started)
            if len(stamps) >= job.max_tokens or (token == eos and not job.ignore_eos):
                break
        elapsed_s = time.perf_counter() - started
        return Outcome.of(elapsed_s, [Timing(stamps[0], stamps[-1], len(stamps))])

    def _run_batch(self, job: Job) -> Outcome:
        started = time.perf_counter()
        batch = _Batch(self._api, self._llama.model, self._settings, job)
        try:
            shared, prompts = job.shared_len, job.prompts
            if shared:
                batch.decode([(one, at, 0, False) for at, one in enumerate(prompts[0][:shared])])
                batch.copy_prefix(shared)
            newest = batch.decode(
                [
                    (token, at, sequence, at == len(prompt) - 1)
                    for sequence, prompt in enumerate(prompts)
                    for at, token in enumerate(prompt)
                    if at >= shared
                ]
            )
            first_s = time.perf_counter() - started
            for step in range(1, job.max_tokens):
                newest = batch.decode(
                    [
                        (newest[sequence], len(prompt) + step - 1, sequence, True)
                        for sequence, prompt in enumerate(prompts)
                    ]
                )
            elapsed_s = time.perf_counter() - started
        finally:
            batch.close()
        timing = Timing(first_s, elapsed_s, job.max_tokens)
        return Outcome.of(elapsed_s, [timing] * len(job.prompts))


class _Batch:
    """A context for several sequences, greedy."""

    def __init__(self, api: Any, model: Any, settings: dict[str, int], job: Job) -> None:
        self._api = api
        self._num_sequences = len(job.prompts)
        params = api.llama_context_default_params()
        params.n_batch = settings["n_batch"]
        params.n_ubatch = settings["n_ubatch"]
        params.n_threads = settings["n_threads"]
        params.n_threads_batch = settings["n_threads_batch"]
        params.n_seq_max = self._num_sequences
        longest = max(map(len, job.prompts)) + job.max_tokens
        params.n_ctx = self._num_sequences * -(-longest // 256) * 256
        # a common prefix can only be shared in one buffer for all sequences
        params.kv_unified = bool(job.shared_len)
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"no context for {self._num_sequences} sequences")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, self._num_sequences)

    def close(self) -> None:
        """Free what Python doesn't see."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)

    def copy_prefix(self, length: int) -> None:
        """Let every sequence begin as the first."""
        memory = self._api.llama_get_memory(self._context)
        for sequence in range(1, self._num_sequences):
            self._api.llama_memory_seq_cp(memory, 0, sequence, 0, length)

    def decode(self, items: Sequence[Item]) -> dict[int, int]:
        """Run tokens; the most likely next token of each sequence whose logits were wanted."""
        import numpy

        found = {}
        batch = self._batch
        for start in range(0, len(items), BATCH_TOKENS):
            chunk = items[start : start + BATCH_TOKENS]
            batch.n_tokens = len(chunk)
            for index, (token, position, sequence, is_wanted) in enumerate(chunk):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = is_wanted
            if self._api.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for index, (_, _, sequence, is_wanted) in enumerate(chunk):
                if is_wanted:
                    logits = self._api.llama_get_logits_ith(self._context, index)
                    row = numpy.ctypeslib.as_array(logits, (self._vocab_size,))
                    found[sequence] = int(row.argmax())
        return found


if __name__ == "__main__":
    main(LlamaCpp)
