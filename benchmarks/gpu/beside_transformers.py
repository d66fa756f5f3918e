"""The part of the measurement that compares throughput with transformers' continuous batching."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence

import torch
from job import Job, random_prompts
from timing import synchronize

from hotshoe import SamplingParams


def comparison(job: Job) -> None:
    """The same requests to hotshoe and to transformers' continuous batching, each warmed up."""
    model, num_reqs, lengths, num_outputs = job.sizes.compared
    numbers = random.Random(0)
    prompts = [
        random_prompts(job.sizes, f"compared {number}", 1, numbers.randint(*lengths))[0]
        for number in range(num_reqs)
    ]
    own = _own_throughput(job, model, prompts, num_outputs)
    job.tell("hotshoe", {"output_tokens_per_s": own})
    theirs = _peer_throughput(job, model, prompts, num_outputs)
    job.tell("generate_batch", {"output_tokens_per_s": theirs})
    # what a CPU does says nothing about a GPU
    ratio = own / theirs if job.sizes.device == "cuda" else None
    job.tell("throughput", {"ratio": ratio})


def _own_throughput(job: Job, model: str, prompts: Sequence[list[int]], num_outputs: int) -> float:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_outputs, ignore_eos=True, detokenize=False
    )
    longest = max(map(len, prompts)) + num_outputs
    with job.llm(model, [(len(prompts), longest)]) as llm:

        def run() -> int:
            outputs = llm.generate(list(prompts), params)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        rate = _second_rate(run, job.sizes.device)
    gc.collect()
    if job.sizes.device == "cuda":
        torch.cuda.empty_cache()  # the other takes what is free
    return rate


def _peer_throughput(job: Job, model: str, prompts: Sequence[list[int]], num_outputs: int) -> float:
    from transformers import (
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
        LlamaConfig,
    )

    with torch.device(job.device):
        peer = AutoModelForCausalLM.from_config(
            LlamaConfig(**job.sizes.models[model]), dtype=job.dtype
        ).eval()
    generation = GenerationConfig(
        max_new_tokens=num_outputs, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = job.sizes.peer_options

    def run() -> int:
        outputs = peer.generate_batch(
            inputs=list(prompts),
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(**options) if options else None,
            progress_bar=False,
            # or the second run would set everything up once more
            persistent_manager=True,
        )
        lengths = [len(one.generated_tokens) for one in outputs.values()]
        if lengths != [num_outputs] * len(prompts):
            raise RuntimeError(f"generate_batch gave {sorted(set(lengths))} tokens a request")
        return sum(lengths)

    return _second_rate(run, job.sizes.device)


def _second_rate(run: Callable[[], int], device: str) -> float:
    """What the second run brings a second."""
    run()
    synchronize(device)
    started = time.perf_counter()
    count = run()
    return count / (time.perf_counter() - started)
