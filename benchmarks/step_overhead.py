"""What the Python around the model costs per step: plan, encode, tensors, sample, commit, outputs.

The model has no layers, so that nothing but this is left. Two settings: 32 running requests, and
256 running ones with contexts of 8k tokens while 1,000 others wait. Medians over steps in
milliseconds, as JSON on standard output.

    python benchmarks/step_overhead.py [--num-steps 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from hotshoe import LLM, SamplingParams
from hotshoe.engine.request import EngineRequest
from hotshoe.entrypoints.outputs import OutputProcessor
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint

VOCAB_SIZE = 512


def build(folder: Path, num_running: int, max_model_len: int) -> LLM:
    """An engine around a model without layers."""
    config = tiny_llama_config(
        num_hidden_layers=0, vocab_size=VOCAB_SIZE, max_position_embeddings=max_model_len
    )
    path = write_tiny_checkpoint(folder, config)
    return LLM(
        str(path),
        dtype="float32",
        max_num_seqs=num_running,
        max_num_batched_tokens=1 << 18,
        cache={"num_blocks": num_running * (max_model_len // 16 + 2)},
    )


def measure(
    num_running: int, context: int, num_waiting: int, num_steps: int, params: SamplingParams
) -> dict[str, float]:
    """Median milliseconds by stage over decode steps."""
    max_model_len = context + num_steps + 64
    max_model_len += -max_model_len % 16
    with (
        tempfile.TemporaryDirectory() as folder,
        build(Path(folder), num_running, max_model_len) as llm,
    ):
        core = llm.engine
        outputs = OutputProcessor(llm.tokenizer)
        for index in range(num_running + num_waiting):
            prompt = [(index * 7 + place) % (VOCAB_SIZE - 8) + 4 for place in range(context)]
            request = EngineRequest(
                request_id=f"request-{index}", prompt_token_ids=prompt, sampling_params=params
            )
            seed = core.add_request(request)
            outputs.start(f"request-{index}", None, [request], [seed])
        plans = []
        submit = core.executor.submit

        def spy(plan):  # type: ignore[no-untyped-def]
            plans.append(plan)
            return submit(plan)

        core.executor.submit = spy  # type: ignore[method-assign]
        records = []
        core.step_observers.append(records.append)
        while not core.planner.running or any(
            not request.token_times_s for request in core.planner.running.values()
        ):
            outputs.process(core.step())
        for _ in range(10):
            outputs.process(core.step())
        records.clear()
        plans.clear()
        totals, encodes, builds = [], [], []
        encode = msgspec.msgpack.Encoder().encode
        for _ in range(num_steps):
            started = perf_counter()
            updates = core.step()
            stepped = perf_counter()
            encode(plans[-1])
            encode(updates)
            encoded = perf_counter()
            outputs.process(updates)
            ended = perf_counter()
            totals.append(ended - started)
            encodes.append(encoded - stepped)
            builds.append(ended - encoded)
        assert len(core.planner.running) == num_running
        assert len(core.planner.waiting) == num_waiting
    stages = {
        name: statistics.median(record.timings_s[name] for record in records) * 1e3
        for name in ("plan", "prepare", "forward", "sample", "draft", "commit")
    }
    stages["encode"] = statistics.median(encodes) * 1e3
    stages["outputs"] = statistics.median(builds) * 1e3
    stages["total"] = statistics.median(totals) * 1e3
    stages["without_model"] = stages["total"] - stages["forward"]
    return {name: round(value, 4) for name, value in stages.items()}


def main() -> None:
    """Measure both settings, greedy and sampled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    greedy = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=None, ignore_eos=True)
    results = {
        "32_running": measure(32, 512, 0, arguments.num_steps, greedy),
        "32_running_sampled": measure(32, 512, 0, arguments.num_steps, sampled),
        "256_running_8k_1000_waiting": measure(256, 8192, 1000, arguments.num_steps, greedy),
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
