"""Driver of OpenVINO GenAI's continuous batching, started by ``compare.py``."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from protocol import Engine, Job, Outcome, Settings, Timing, main, unknown_variant


class OpenVino(Engine):
    """A pipeline on the CPU device."""

    def __init__(self, settings: Settings) -> None:
        kind = f"openvino-{settings.variant}"
        if kind not in settings.models:
            unknown_variant(settings, *(one[9:] for one in settings.models if "openvino-" in one))
        import openvino_genai

        self._genai = openvino_genai
        self._drafts = {}
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings.num_threads}
        if settings.drafts:
            properties["prompt_lookup"] = True
            self._drafts = {
                "num_assistant_tokens": settings.num_draft_tokens,
                "max_ngram_size": settings.max_ngram,
            }
        self._scheduler = {
            "cache_size": settings.kv_cache_gb,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": True,
        }
        self._properties = properties
        self._model = settings.models[kind]
        self._seen: set[tuple[int, ...]] = set()
        self._pipeline: Any = None
        self._start()

    def _start(self) -> None:
        scheduler = self._genai.SchedulerConfig()
        for name, value in self._scheduler.items():
            setattr(scheduler, name, value)
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            self._model, scheduler, "CPU", self._properties
        )

    def describe(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("openvino-genai"),
            "settings": {**self._scheduler, **self._properties, **self._drafts},
        }

    def run(self, job: Job) -> Outcome:
        import numpy
        import openvino

        self._forget(job)
        pipeline = self._pipeline
        config = self._config(job)
        prompts = [openvino.Tensor(numpy.array([one], dtype=numpy.int64)) for one in job.prompts]
        stamps: list[list[float]] = [[] for _ in prompts]
        started = time.perf_counter()
        handles = [
            pipeline.add_request(number, prompt, config) for number, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - started
            for handle, times in zip(handles, stamps, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        times += [now] * len(output.generated_ids)
        elapsed_s = time.perf_counter() - started
        timings = [Timing(times[0], times[-1], len(times)) for times in stamps]
        return Outcome.of(elapsed_s, timings)

    def _forget(self, job: Job) -> None:
        """Its prefix cache can't be emptied, so a new pipeline takes prompts that it has seen."""
        prompts = {tuple(prompt) for prompt in job.prompts}
        if not job.keep_cache and prompts & self._seen:
            self._pipeline = None
            self._start()
            self._seen.clear()
            self.run(Job("", [[5, 6, 7, 8]], 2))
        self._seen |= prompts

    def _config(self, job: Job) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = job.ignore_eos
        config.do_sample = False
        config.apply_chat_template = False
        for name, value in self._drafts.items():
            setattr(config, name, value)
        if not job.ignore_eos:
            constraint = self._genai.StructuredOutputConfig()
            if job.json_schema is not None:
                constraint.json_schema = job.json_schema
            else:
                constraint.regex = job.regex
            config.structured_output_config = constraint
            config.eos_token_id = self._pipeline.get_config().eos_token_id
        return config


if __name__ == "__main__":
    main(OpenVino)
