"""Driver of plain ``transformers`` (``generate`` on a padded batch), started by ``compare.py``."""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

from protocol import Engine, Job, Outcome, Settings, Timing, UnsupportedError, main, unknown_variant

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Transformers(Engine):
    """A model with the library's own generation loop. It shares no prefixes."""

    def __init__(self, settings: Settings) -> None:
        if settings.variant not in DTYPES:
            unknown_variant(settings, *DTYPES)
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.num_threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            settings.models["checkpoint"],
            dtype=getattr(torch, DTYPES[settings.variant]),
            attn_implementation="sdpa",
        ).eval()
        self._drafts = {}
        if settings.drafts:
            self._drafts = {
                "prompt_lookup_num_tokens": settings.num_draft_tokens,
                "max_matching_ngram_size": settings.max_ngram,
            }

    def describe(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("transformers"),
            "torch": importlib.metadata.version("torch"),
            "settings": {"attn_implementation": "sdpa", **self._drafts},
        }

    def run(self, job: Job) -> Outcome:
        if not job.ignore_eos:
            raise UnsupportedError("no constrained output of its own")
        if job.keep_cache:
            raise UnsupportedError("no prefix cache")
        torch = self._torch
        longest, padding = max(map(len, job.prompts)), self._model.config.eos_token_id
        rows = [[padding] * (longest - len(one)) + one for one in job.prompts]
        mask = [[0] * (longest - len(one)) + [1] * len(one) for one in job.prompts]
        stamps: list[float] = []
        started = time.perf_counter()

        def stamp(input_ids: Any, scores: Any) -> Any:
            stamps.append(time.perf_counter() - started)
            return scores

        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                min_new_tokens=job.max_tokens,
                max_new_tokens=job.max_tokens,
                pad_token_id=padding,
                logits_processor=[stamp],
                **self._drafts,
            )
        elapsed_s = time.perf_counter() - started
        num_tokens = output.shape[1] - longest
        # called before a token is chosen: the first time is the first token's
        timing = Timing(stamps[0], elapsed_s, num_tokens)
        return Outcome.of(elapsed_s, [timing] * len(job.prompts))


if __name__ == "__main__":
    main(Transformers)
