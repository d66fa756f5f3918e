"""Driver of hotshoe, started by ``compare.py``."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from protocol import Engine, Job, Outcome, Settings, Timing, UnsupportedError, main, unknown_variant

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "gguf": {"quantization": "gguf"},
    "torch": {"kernels": "torch", "attention": "torch_sdpa", "sampler": "standard"},
}


class Hotshoe(Engine):
    """An offline engine in this process."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from hotshoe import LLM

        if settings.variant not in VARIANTS:
            unknown_variant(settings, *VARIANTS)
        torch.set_num_threads(settings.num_threads)
        model = settings.models["gguf" if settings.variant == "gguf" else "checkpoint"]
        arguments = dict(VARIANTS[settings.variant])
        if settings.drafts:
            # how many drafts pay is for the engine to find out: its defaults say at most
            arguments["spec_decode"] = "ngram"
        self._arguments = arguments
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            cache={"memory_gb": float(settings.kv_cache_gb)},
            **arguments,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("hotshoe"),
            "torch": importlib.metadata.version("torch"),
            "settings": self._arguments,
            "components": self._llm.components,
        }

    def run(self, job: Job) -> Outcome:
        from hotshoe import SamplingParams
        from hotshoe.api import StructuredOutputs

        constraint = None
        if not job.ignore_eos:
            if self._llm.config.guided_decoding.name is None:
                raise UnsupportedError("no guided-decoding backend is selected")
            constraint = StructuredOutputs(json=job.json_schema, regex=job.regex)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=job.max_tokens,
            ignore_eos=job.ignore_eos,
            detokenize=False,
            structured_outputs=constraint,
        )
        if not job.keep_cache:
            self._llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = self._llm.generate(job.prompts, params)
        elapsed_s = time.perf_counter() - started
        timings = []
        for output in outputs:
            metrics = output.outputs[0].metrics
            assert metrics is not None  # the request has finished
            times = [one - metrics.arrival_time_s for one in metrics.token_times_s]
            timings.append(Timing(times[0], times[-1], len(times)))
        num_cached = sum(output.num_cached_tokens for output in outputs)
        return Outcome.of(elapsed_s, timings, num_cached_tokens=num_cached)


if __name__ == "__main__":
    main(Hotshoe)
