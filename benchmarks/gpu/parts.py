"""The parts of the measurement. Each runs in a process of its own and tells its figures one by one,
so that what fails or takes too long costs no other.
"""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from costs import ModelCosts
from random_model import write_config
from sizes import Sizes
from timing import FOLLOWING_US, KernelTimes, idle_share, seconds_per_call, synchronize
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    AttentionContext,
    AttentionSpec,
    KernelsContext,
    KVCacheSpec,
    SampleInput,
    SamplerContext,
    StepRecord,
    Weight,
)
from hotshoe.bench.machine import describe_machine, describe_versions
from hotshoe.plugins import PluginRegistry
from hotshoe.testing.attention_reference import LayerFacts
from hotshoe.testing.forward import allocate_cache, make_batch
from hotshoe.weights.gguf import BLOCK_SIZES

REPOSITORY = Path(__file__).parents[2]
BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 8192
Tell = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a part is given.

    Attributes:
        sizes: of what it measures.
        bandwidth: bytes a second that a copy moves, read and written; None: not measured.
        matrix_rate: operations a second of a matrix product; None: not measured.
        tell: takes a figure's name and its entries.
    """

    sizes: Sizes
    bandwidth: float | None
    matrix_rate: float | None
    tell: Tell

    def bandwidth_share(self, num_bytes: float, seconds: float) -> float | None:
        """What share of the bandwidth it takes to move so many bytes in that time."""
        return None if self.bandwidth is None else num_bytes / seconds / self.bandwidth

    def matrix_share(self, num_operations: float, seconds: float) -> float | None:
        """Likewise of the matrix rate."""
        return None if self.matrix_rate is None else num_operations / seconds / self.matrix_rate

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and weights."""
        found: torch.dtype = getattr(torch, self.sizes.dtype)
        return found

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device(self.sizes.device)

    @contextmanager
    def llm(self, model: str, batches: Sequence[tuple[int, int]], **changes: Any) -> Iterator[LLM]:
        """An engine on random weights.

        Args:
            model: one of the sizes'.
            batches: numbers of requests and of tokens of each that it has to hold.
            changes: of its configuration.
        """
        lengths = [BLOCK_SIZE * -(-length // BLOCK_SIZE) for _, length in batches]
        max_num_seqs, max_model_len = max(batch for batch, _ in batches), max(lengths)
        num_blocks = max(
            batch * length // BLOCK_SIZE
            for (batch, _), length in zip(batches, lengths, strict=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            source = write_config(Path(folder), dict(self.sizes.models[model]))
            settings: dict[str, Any] = {
                **self.sizes.components,
                "device": self.sizes.device,
                "dtype": self.sizes.dtype,
                "max_model_len": max_model_len,
                "scheduler": {
                    "max_num_seqs": max_num_seqs,
                    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                },
                "cache": {
                    "num_blocks": max(num_blocks, max_model_len // BLOCK_SIZE),
                    "enable_prefix_caching": False,
                },
                **changes,
            }
            with LLM(source, **settings) as llm:
                yield llm


# -- limits ---------------------------------------------------------------------------------


def limits(job: Job) -> None:
    """The bandwidth of a large copy and the rate of a large matrix product, on random data; and
    where they were measured.
    """
    sizes = job.sizes
    if sizes.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no usable GPU; --dry-run does without")
    job.tell("environment", environment())
    source = torch.empty(sizes.limit_bytes // 2, dtype=torch.int16, device=job.device)
    source.random_()
    target = torch.empty_like(source)
    copying_s = seconds_per_call(lambda _: target.copy_(source), sizes.device, sizes.num_repeats)
    width = sizes.limit_width
    left, right = (torch.randn(width, width, device=job.device, dtype=job.dtype) for _ in range(2))
    multiplying_s = seconds_per_call(
        lambda _: torch.mm(left, right), sizes.device, sizes.num_repeats
    )
    # those of a CPU say nothing about a GPU
    is_gpu = sizes.device == "cuda"
    job.tell(
        "limits",
        {
            "bandwidth_gb_per_s": 2 * source.nbytes / copying_s / 1e9 if is_gpu else None,
            "matrix_tflop_per_s": 2 * width**3 / multiplying_s / 1e12 if is_gpu else None,
        },
    )


def environment() -> dict[str, Any]:
    """Machine and versions."""
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": {
            **describe_versions(),
            "triton": version("triton"),
            "cuda": torch.version.cuda,
        },
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "num_multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


# -- tests ----------------------------------------------------------------------------------


def tests(job: Job) -> None:
    """Those that need a GPU; in a dry run there is none."""
    if job.sizes.device != "cuda":
        job.tell("tests", {"num_passed": None, "num_failed": None, "num_skipped": None})
        return
    memory = "tests/gpu/test_memory.py"
    counts = _tested("tests/gpu", "--ignore", memory, *_processes())
    job.tell("tests", counts)
    # some of these fill the GPU, so nothing runs beside them
    more = _tested(memory)
    job.tell("tests", {name: count + more[name] for name, count in counts.items()})


def _processes() -> list[str]:
    """Arguments for several: most of the time kernels are compiled, each by one core."""
    if find_spec("xdist") is None:
        return []
    return ["-n", str(min(8, os.cpu_count() or 1))]


def _tested(*arguments: str) -> dict[str, int]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", *arguments]
    # modules of these folders have names that tests have too
    own = (Path(__file__).parent, Path(__file__).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(path for path in paths if Path(path) not in own)
    environment = {**os.environ, "PYTHONPATH": kept}
    output = ""
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:  # so that the log has what came before a stop
            print(line, end="", flush=True)
            output += line
    return counts_of(output)


def counts_of(output: str) -> dict[str, int]:
    """From the last line that pytest prints, such as ``3 passed, 1 skipped in 0.5s``; without such
    a line something has failed.
    """
    last = output.strip().rpartition("\n")[2]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last)}
    names = ("failed", "errors", "error")
    return {
        "num_passed": counts.get("passed", 0),
        "num_failed": sum(counts.get(name, 0) for name in names) if " in " in last else 1,
        "num_skipped": counts.get("skipped", 0),
    }


# -- kernels alone --------------------------------------------------------------------------


def attention(job: Job) -> None:
    """The attention of one layer in a decode step, again and again."""
    num_heads, num_kv_heads, head_dim = job.sizes.attention_heads
    num_reqs, context = job.sizes.attention_batch
    spec = AttentionSpec(
        num_heads=num_heads,
        kv=KVCacheSpec(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=job.sizes.dtype,
        ),
        scale=head_dim**-0.5,
        dtype=job.sizes.dtype,
    )
    registry = PluginRegistry()
    backend = registry.build(
        registry.load("attention", job.sizes.attention),
        {},
        AttentionContext(
            device=job.device,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_reqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=context,
        ),
        section="attention",
    )
    blocks_per_request = -(-context // BLOCK_SIZE)
    num_blocks = num_reqs * blocks_per_request
    cache = allocate_cache(backend, spec, num_blocks, job.device)
    for pages in cache.values():
        pages.normal_()
    order = list(range(num_blocks))
    random.Random(0).shuffle(order)
    tables = [
        order[start : start + blocks_per_request]
        for start in range(0, num_blocks, blocks_per_request)
    ]
    batch = make_batch([1] * num_reqs, [context] * num_reqs, tables, BLOCK_SIZE, device=job.device)
    metadata = backend.build_metadata(batch, spec.kv)
    q, k, v = (
        torch.randn(num_reqs, heads, head_dim, device=job.device, dtype=job.dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    layer = LayerFacts(spec)

    def run(_: int) -> Tensor:
        return backend.forward(layer, q, k, v, cache, metadata)

    num_bytes = 2 * num_reqs * context * num_kv_heads * head_dim * job.dtype.itemsize
    for is_recorded in (False, True):  # if it can't be recorded, there is a figure all the same
        with torch.inference_mode():
            seconds = seconds_per_call(
                run, job.sizes.device, job.sizes.num_repeats, is_recorded=is_recorded
            )
        job.tell(
            "decode",
            {
                "num_reqs": num_reqs,
                "context": context,
                "us": 1e6 * seconds,
                "share_of_bandwidth": job.bandwidth_share(num_bytes, seconds),
                "is_recorded": is_recorded,
            },
        )


def linears(job: Job) -> None:
    """Products with weights of every format that the kernels execute."""
    registry = PluginRegistry()
    kernels = registry.build(
        registry.load("kernels", job.sizes.kernels),
        {},
        KernelsContext(device=job.device, dtype=job.dtype),
        section="kernels",
    )
    for weight_format in kernels.capabilities.weight_formats:
        if weight_format not in _TENSORS:
            continue
        for n, k in job.sizes.linear_shapes:
            # several, so that none is in the cache when its turn comes
            weights = [_random_weight(weight_format, n, k, job) for _ in range(4)]
            num_bytes = sum(one.nbytes for one in weights[0].tensors.values())
            prepared = [kernels.prepare_weight(one) for one in weights]
            for num_rows in job.sizes.linear_rows:
                x = torch.randn(num_rows, k, device=job.device, dtype=job.dtype)

                def run(number: int, prepared: Any = prepared, x: Tensor = x) -> Tensor:
                    return kernels.linear(x, prepared[number % len(prepared)])

                with torch.inference_mode():
                    seconds = seconds_per_call(
                        run, job.sizes.device, job.sizes.num_repeats, is_recorded=True
                    )
                moved = num_bytes + (n + k) * num_rows * job.dtype.itemsize
                job.tell(
                    f"{weight_format} {n} x {k}, {num_rows} tokens",
                    {
                        "us": 1e6 * seconds,
                        "share_of_bandwidth": job.bandwidth_share(moved, seconds),
                        "share_of_matrix_rate": job.matrix_share(2 * n * k * num_rows, seconds),
                    },
                )


def draws(job: Job) -> None:
    """What samplers take for a step's tokens, from random logits that are copied first, because a
    sampler may overwrite them.
    """
    registry = PluginRegistry()
    for name in job.sizes.samplers:
        for num_rows, vocab_size in job.sizes.drawn:
            context = SamplerContext(device=job.device, vocab_size=vocab_size)
            sampler = registry.build(
                registry.load("samplers", name), {}, context, section="sampler"
            )
            uniforms = torch.rand(num_rows, device=job.device, dtype=torch.float64)
            for kind, parameters in _DRAWS.items():
                inputs = _sample_input(num_rows, vocab_size, job, **parameters)

                def run(
                    _: int,
                    sampler: Any = sampler,
                    inputs: SampleInput = inputs,
                    uniforms: Tensor = uniforms,
                ) -> Tensor:
                    drawn: Tensor = sampler.draw(
                        replace(inputs, logits=inputs.logits.clone()), uniforms
                    )
                    return drawn

                with torch.inference_mode():
                    seconds = seconds_per_call(
                        run, job.sizes.device, job.sizes.num_repeats, is_recorded=True
                    )
                figure = f"{name}, {num_rows} rows of {vocab_size}, {kind}"
                job.tell(figure, {"us": 1e6 * seconds})


_DRAWS: dict[str, dict[str, float]] = {
    "as they are": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
}


def _sample_input(
    num_rows: int, vocab_size: int, job: Job, top_k: float = 0, top_p: float = 1
) -> SampleInput:
    device = job.device
    return SampleInput(
        logits=3 * torch.randn(num_rows, vocab_size, device=device),
        temperature=torch.ones(num_rows, device=device),
        top_k=torch.full((num_rows,), int(top_k), device=device),
        top_p=torch.full((num_rows,), float(top_p), device=device),
        min_p=torch.zeros(num_rows, device=device),
        is_all_greedy=False,
        is_any_filtered=top_k > 0 or top_p < 1,
        extra_args=[None] * num_rows,
    )


def _random_weight(weight_format: str, n: int, k: int, job: Job) -> Weight:
    tensors = _TENSORS[weight_format](n, k, job)
    return Weight(format=weight_format, out_features=n, in_features=k, tensors=tensors)


def _dense(n: int, k: int, job: Job) -> dict[str, Tensor]:
    return {"weight": torch.randn(n, k, device=job.device, dtype=job.dtype) * k**-0.5}


def _int8(n: int, k: int, job: Job) -> dict[str, Tensor]:
    weight = torch.randint(-127, 128, (n, k), device=job.device, dtype=torch.int8)
    return {"weight": weight, "scales": torch.full((n,), 0.01 * k**-0.5, device=job.device)}


def _blocks(weight_format: str, num_scales: int) -> Callable[[int, int, Job], dict[str, Tensor]]:
    """Random blocks behind scales that are none too large."""

    def make(n: int, k: int, job: Job) -> dict[str, Tensor]:
        values_per_block, bytes_per_block = BLOCK_SIZES[weight_format]
        shape = (n, k // values_per_block, bytes_per_block)
        blocks = torch.randint(0, 256, shape, device=job.device, dtype=torch.uint8)
        scales = torch.full((*shape[:2], num_scales), 0.01 * k**-0.5, device=job.device)
        blocks[..., : 2 * num_scales] = scales.half().view(torch.uint8)
        return {"blocks": blocks.view(n, -1)}

    return make


_TENSORS: dict[str, Callable[[int, int, Job], dict[str, Tensor]]] = {
    "dense": _dense,
    "int8": _int8,
    "q8_0": _blocks("q8_0", 1),
    "q4_0": _blocks("q4_0", 1),
    "q4_1": _blocks("q4_1", 2),
}


# -- whole models ---------------------------------------------------------------------------


def decode(job: Job, model: str) -> None:
    """Decode steps of several batches, how idle the GPU is between them, and a long prompt."""
    sizes = job.sizes
    costs = ModelCosts.of(sizes.models[model])
    batches = [
        (batch, context + num_tokens(sizes, batch, context)) for batch, context in sizes.decode
    ]
    recorded = {"record_batch_sizes": [batch for batch, _ in sizes.decode]}
    with job.llm(
        model, [*batches, (1, sizes.prefill_tokens + 2)], **_with(sizes, "kernels", recorded)
    ) as llm:
        for batch, context in sizes.decode:
            _decode(job, llm, costs, batch, context)
        _prefill(job, llm, costs)


def _decode(job: Job, llm: LLM, costs: ModelCosts, batch: int, context: int) -> None:
    sizes = job.sizes
    step_s = median(decode_steps(llm, sizes, batch, context))
    # on average, over requests and steps
    num_seen = batch * (context + num_tokens(sizes, batch, context) // 2)
    num_params = costs.layer_params + costs.head_params
    num_bytes = job.dtype.itemsize * (num_params + costs.kv_params_per_token * num_seen)
    figures = {
        "step_ms": 1e3 * step_s,
        "output_tokens_per_s": batch / step_s,
        "share_of_bandwidth": job.bandwidth_share(num_bytes, step_s),
    }
    name = f"batch {batch}, context {context}"
    job.tell(name, figures)  # what follows may fail
    intervals = kernel_times(llm, sizes, batch, context)
    job.tell(
        name,
        {
            **figures,
            "idle_between_steps": idle_share(intervals, FOLLOWING_US),
            "idle_with_all_pauses": idle_share(intervals, 0.0),
        },
    )


def _prefill(job: Job, llm: LLM, costs: ModelCosts) -> None:
    length = job.sizes.prefill_tokens
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for number in range(5):
        prompt = random_prompts(job.sizes, f"prefill {number}", 1, length)
        started = time.perf_counter()
        llm.generate(prompt, params)
        times.append(time.perf_counter() - started)
    seconds = min(times[1:])
    num_pairs = length * (length + 1) / 2
    num_operations = 2 * (length * costs.layer_params + costs.head_params)
    num_operations += 4 * num_pairs * costs.attention_width
    job.tell(
        "prefill",
        {
            "num_tokens": length,
            "ms": 1e3 * seconds,
            "tokens_per_s": length / seconds,
            "share_of_matrix_rate": job.matrix_share(num_operations, seconds),
        },
    )


def switches(job: Job) -> None:
    """Decode steps with parts turned off that take away the time between kernels."""
    model, batches = job.sizes.switched
    sizes = job.sizes
    variants: dict[str, dict[str, Any]] = {
        "as it is": _with(sizes, "kernels", {"record_batch_sizes": list(batches)}),
        "no graphs": _with(sizes, "kernels", {"record": False}),
        "no overlap": {"executor": {"name": "uniproc", "options": {"max_in_flight": 1}}},
        "neither": {
            **_with(sizes, "kernels", {"record": False}),
            "executor": {"name": "uniproc", "options": {"max_in_flight": 1}},
        },
    }
    for name, changes in variants.items():
        context = 16
        lengths = [(batch, context + num_tokens(sizes, batch, context)) for batch in batches]
        with job.llm(model, lengths, **changes) as llm:
            for batch in batches:
                step_s = median(decode_steps(llm, sizes, batch, context))
                job.tell(f"{name}, batch {batch}", {"step_ms": 1e3 * step_s})


def _with(sizes: Sizes, section: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config section with changes to what the sizes say of it."""
    name = sizes.components.get(section)
    return {section: {**({"name": name} if name else {}), **changes}}


def random_prompts(sizes: Sizes, seed: str, number: int, length: int) -> list[list[int]]:
    """Prompts of ids that every model has."""
    numbers = random.Random(seed)
    num_ids = min(config["vocab_size"] for config in sizes.models.values())
    return [[numbers.randrange(num_ids) for _ in range(length)] for _ in range(number)]


def num_tokens(sizes: Sizes, batch: int, context: int) -> int:
    """Output tokens of each request so that there are ``num_steps`` in which all decode: the first
    ones decode while the prompts of the last are computed.
    """
    return sizes.num_steps + batch * context // MAX_NUM_BATCHED_TOKENS + 3


def decode_steps(llm: LLM, sizes: Sizes, batch: int, context: int) -> list[float]:
    """Seconds from each step to the next in which all requests decode."""
    commits: list[tuple[bool, float]] = []

    def observe(record: StepRecord) -> None:
        is_full = record.num_decode_tokens == batch and not record.num_prefill_tokens
        commits.append((is_full, time.perf_counter()))

    _generate(llm, sizes, batch, context, observe)
    periods = [
        after - before
        for (was_full, before), (is_full, after) in pairwise(commits)
        if was_full and is_full
    ]
    if not periods:
        raise RuntimeError(f"no two steps had all {batch} requests with contexts of {context}")
    return periods


def kernel_times(llm: LLM, sizes: Sizes, batch: int, context: int) -> list[tuple[float, float]]:
    """When kernels ran during steps in which all requests decode."""
    num_steps = 0
    times = KernelTimes()
    found: list[tuple[float, float]] = []

    def observe(record: StepRecord) -> None:
        nonlocal num_steps, found
        if record.num_decode_tokens == batch and not record.num_prefill_tokens:
            num_steps += 1
            if num_steps == 2:
                times.start()
            elif num_steps == sizes.num_steps - 1:
                found = times.stop()

    try:
        _generate(llm, sizes, batch, context, observe)
    finally:
        if times.is_running:
            found = times.stop()
    return found[len(found) // 8 :]  # the first ones come while the profiler starts


def _generate(
    llm: LLM, sizes: Sizes, batch: int, context: int, observe: Callable[[StepRecord], None]
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens(sizes, batch, context),
        ignore_eos=True,
        detokenize=False,
    )
    llm.on_step(observe)
    try:
        llm.generate(random_prompts(sizes, f"{batch}/{context}", batch, context), params)
    finally:
        llm.engine.step_observers.remove(observe)


# -- beside transformers --------------------------------------------------------------------


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
