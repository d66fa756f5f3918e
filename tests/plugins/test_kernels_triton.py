"""The Triton kernels: their results in the interpreter, that they compile for GPUs, and what is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from hotshoe.api import ConfigError, KernelsContext, ModelLoadError, NotRecordableError, Weight
from hotshoe.testing.no_syncs import PretendGpu
from hotshoe_kernels import cpu, triton
from hotshoe_kernels import torch as torch_kernels
from hotshoe_kernels.triton.graphs import GraphRecorder
from hotshoe_kernels.triton.kernels import TritonKernels
from hotshoe_kernels.triton.options import TritonKernelsOptions
from hotshoe_quantization import gguf, int8, none
from hotshoe_triton.compile_only import CAPABILITIES, CompiledLaunch, compile_only
from hotshoe_triton.runtime import reasons_against_device, reasons_against_machine
from interpreted.run import run_interpreted

NUM_PROCESSORS = {80: 108, 90: 132, 100: 148}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = ("_dense_product", "_quantized_product", "_multiply")
QUANTIZED = ("int8", "q8_0", "q4_0", "q4_1")
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


@pytest.mark.slow
def test_the_conformance_suite_passes_in_the_interpreter() -> None:
    run_interpreted("kernels.py")


# -- compiled, not run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _cold_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Triton has compiled before doesn't count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.parametrize(
    ("capability", "dtype", "formats"),
    [
        (80, "float16", ("int8", "q4_1")),
        (90, "bfloat16", QUANTIZED),
        (100, "float32", ("q8_0", "q4_0")),
    ],
)
def test_kernels_compile_without_spilling_registers(
    capability: int, dtype: str, formats: tuple[str, ...]
) -> None:
    launches = small_ops(capability, dtype)
    for weight_format in formats:
        launches += products(capability, dtype, weight_format, (1, 8, 16, 300))
    launches += products(capability, dtype, "dense", (1, 4))
    spilled = {launch.name for launch in launches if launch.local_bytes}
    assert not spilled
    assert {launch.name for launch in launches} == {
        *("_rms_norm", "_rope", "_silu_and_mul", "_dense_product", "_quantize_rows"),
        *("_quantized_product", "_multiply", "_add_splits", "_read_rows"),
    }


@pytest.mark.full
@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_format", ["dense", *QUANTIZED])
@pytest.mark.parametrize("shape_NK", [(28672, 4096), (960, 576), (129, 11008)], ids=str)
def test_products_compile_for_everything(
    capability: int, dtype: str, weight_format: str, shape_NK: tuple[int, int]
) -> None:
    num_rows = (*range(1, 10), 16, 17, 33, 65, 128, 256, 257)
    launches = products(capability, dtype, weight_format, num_rows, shape_NK)
    if dtype != "float32":
        # the head's 8 rows of float32 results may take a few words more than there are registers
        assert max(launch.local_bytes for launch in launches) <= 32


@pytest.mark.full
@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_ops_compile_for_everything(capability: int, dtype: str) -> None:
    for size in (64, 100, 576, 2048, 8192, 16384):
        for head_dim in (64, 80, 128, 256):
            small_ops(capability, dtype, size=size, head_dim=head_dim)


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.parametrize(
    ("num_rows", "names"),
    [
        (1, ["_quantize_rows", "_quantized_product"]),
        (8, ["_quantize_rows", "_quantized_product"]),
        (9, ["_multiply", "_add_splits"]),
        (256, ["_multiply", "_add_splits"]),
        # the weight's values are made in two parts
        (257, ["_read_rows", "_read_rows"]),
    ],
)
def test_the_number_of_rows_decides_how_a_product_is_computed(
    num_rows: int, names: list[str]
) -> None:
    launches = products(90, "bfloat16", "q8_0", (num_rows,), (12288, 4096), bias=False)
    assert [launch.name for launch in launches] == names


@pytest.mark.usefixtures("_cold_cache")
def test_parts_of_a_merged_projection_share_quantized_activations() -> None:
    kernels = make_kernels(90, "bfloat16")
    parts = tuple(weight_of(one, 1024, 4096, torch.bfloat16) for one in ("q4_0", "dense", "q8_0"))
    merged = kernels.prepare_weight(
        Weight(format="mixed", out_features=3072, in_features=4096, tensors={}, parts=parts)
    )
    with compile_only(90) as launches:
        output = kernels.linear(meta(2, 4096, dtype=torch.bfloat16), merged)
    assert output.shape == (2, 3072)
    assert [launch.name for launch in launches] == [
        *("_quantize_rows", "_quantized_product", "_dense_product", "_quantized_product")
    ]


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.parametrize(
    ("weight_format", "num_rows", "most"),
    [("q4_0", range(1, 9), 4), ("dense", range(1, 5), 3), ("q8_0", (17, 20, 24, 31, 32), 1)],
)
def test_few_kernels_serve_all_numbers_of_rows(
    weight_format: str, num_rows: Sequence[int], most: int
) -> None:
    # one that is compiled while requests wait holds all of them up
    kernels = make_kernels(90, "bfloat16")
    shape_NK = (4096, 1024)
    weight = kernels.prepare_weight(weight_of(weight_format, *shape_NK, torch.bfloat16))
    with compile_only(90) as launches:
        for num in num_rows:
            kernels.linear(meta(num, shape_NK[1], dtype=torch.bfloat16), weight)
    made = {launch.cubin for launch in launches if launch.name in PRODUCTS}
    assert len(made) <= most


@pytest.mark.usefixtures("_cold_cache")
def test_options_decide_how_many_rows_are_few() -> None:
    kernels = make_kernels(90, "bfloat16", dense_rows=0, quantized_rows=0)
    x = meta(1, 4096, dtype=torch.bfloat16)
    weights = [
        kernels.prepare_weight(weight_of(one, 4096, 4096, torch.bfloat16))
        for one in ("dense", "q8_0")
    ]
    with compile_only(90) as launches:
        for weight in weights:
            assert kernels.linear(x, weight).shape == (1, 4096)
    assert [launch.name for launch in launches] == ["_multiply", "_add_splits"]
    with pytest.raises(ValidationError, match="less than or equal to 8"):
        TritonKernelsOptions(dense_rows=9)


@pytest.mark.usefixtures("_cold_cache")
@pytest.mark.parametrize("num_out", [128256, 4096, 2048, 960])
def test_every_processor_has_several_warps_to_read_a_weight_with(num_out: int) -> None:
    (launch,) = products(90, "bfloat16", "dense", (1,), (num_out, 4096))
    assert launch.grid[0] >= 4 * 132


def small_ops(
    capability: int, dtype: str, *, size: int = 4096, head_dim: int = 128
) -> list[CompiledLaunch]:
    """What the ops between products launch."""
    kernels, of = make_kernels(capability, dtype), DTYPES[dtype]
    table = meta(64, head_dim // 2, dtype=torch.float32)
    with compile_only(capability) as launches:
        for width in (size, 2 * size):
            x = meta(4, width, dtype=of)
            kernels.rms_norm(x, meta(width, dtype=of), 1e-5)
            kernels.rms_norm(x, meta(width, dtype=of), 1e-5, meta(4, width, dtype=of))
        q, k = meta(4, 32, head_dim, dtype=of), meta(4, 8, head_dim, dtype=of)
        kernels.rms_norm(q, meta(head_dim, dtype=of), 1e-5)
        kernels.rope(q, k, meta(4, dtype=torch.int64), table, table)
        kernels.silu_and_mul(meta(4, 2 * size, dtype=of))
    return launches


def products(
    capability: int,
    dtype: str,
    weight_format: str,
    num_rows: tuple[int, ...],
    shape_NK: tuple[int, int] = (4096, 4096),
    *,
    bias: bool = True,
) -> list[CompiledLaunch]:
    """What is launched to multiply with a weight, and to look rows up in it."""
    kernels, of = make_kernels(capability, dtype), DTYPES[dtype]
    n, k = shape_NK
    weight = kernels.prepare_weight(weight_of(weight_format, n, k, of, bias=bias))
    with compile_only(capability) as launches:
        for num in num_rows:
            x = meta(num, k, dtype=of)
            assert kernels.linear(x, weight).shape == (num, n)
        if len(num_rows) > 1:
            assert kernels.logits(x[:1], weight).dtype == torch.float32
            kernels.embedding(meta(4, dtype=torch.int64), weight)
    return launches


def make_kernels(capability: int, dtype: str, **options: int) -> TritonKernels:
    """Kernels as for a GPU."""
    return TritonKernels(
        TritonKernelsOptions(**options),
        triton.capabilities(),
        dtype=DTYPES[dtype],
        num_processors=NUM_PROCESSORS[capability],
        recorder=GraphRecorder(torch.device("cuda")),
    )


def weight_of(
    weight_format: str, n: int, k: int, dtype: torch.dtype, *, bias: bool = False
) -> Weight:
    """A weight without values, as it is loaded."""
    if weight_format == "dense":
        tensors = {"weight": meta(n, k, dtype=dtype)}
    elif weight_format == "int8":
        tensors = {"weight": meta(n, k, dtype=torch.int8), "scales": meta(n, dtype=torch.float32)}
    else:
        tensors = {"blocks": meta(n, k // 32 * BLOCK_BYTES[weight_format], dtype=torch.uint8)}
    if bias:
        tensors["bias"] = meta(n, dtype=dtype)
    return Weight(format=weight_format, out_features=n, in_features=k, tensors=tensors)


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory: reading a number of it is an error."""
    return torch.empty(*shape, dtype=dtype, device="meta")


# -- what is refused -------------------------------------------------------------------------------


def test_dense_values_of_another_dtype_are_refused() -> None:
    weight = weight_of("dense", 4, 4, torch.float32)
    with pytest.raises(ModelLoadError, match=r"'torch\.float32', but activations have"):
        make_kernels(90, "bfloat16").prepare_weight(weight)


def test_quantized_weights_of_odd_width_are_refused() -> None:
    weight = weight_of("int8", 4, 48, torch.bfloat16)
    with pytest.raises(ModelLoadError, match="'int8' has 48 inputs, which is no multiple of 32"):
        make_kernels(90, "bfloat16").prepare_weight(weight)


def test_without_triton_the_component_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotshoe_triton.runtime.find_spec", lambda name: None)
    (reason,) = triton.hotshoe_component().unsupported
    assert reason.startswith("the package triton is not installed; pip install triton")


def test_a_cpu_is_refused_with_the_reason() -> None:
    component = triton.hotshoe_component()
    assert triton.capabilities().devices == ("cuda",)
    context = KernelsContext(device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ConfigError, match="'cpu': Triton kernels run on 'cuda', not on 'cpu'"):
        component.factory(component.options(), context)


def test_a_machine_without_a_usable_gpu_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    (reason,) = reasons_against_machine()
    assert reason == f"torch {torch.__version__} is built without CUDA; install a build with it"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (reason,) = reasons_against_machine()
    assert reason.startswith("torch finds no GPU; check that nvidia-smi lists one")


def test_an_old_gpu_is_refused_unless_there_is_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(7, 5), (9, 0)]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    assert reasons_against_machine() == []
    (reason,) = reasons_against_device(torch.device("cuda", 0))
    assert "an old one has compute capability 7.5, and kernels need 8.0" in reason
    capabilities[1] = (7, 0)
    assert reasons_against_machine() == [reason]


def test_auto_prefers_them_and_they_execute_what_quantizations_make() -> None:
    component = triton.hotshoe_component()
    others = (cpu.hotshoe_component(), torch_kernels.hotshoe_component())
    assert component.auto_priority > max(other.auto_priority for other in others)
    offered = triton.capabilities()
    for quantization in (gguf, int8, none):
        made = quantization.CAPABILITIES
        assert set(made.weight_formats) <= set(offered.weight_formats)
        assert set(made.embedding_formats) <= set(offered.embedding_formats)


# -- recordings ------------------------------------------------------------------------------------


class PretendCuda:
    """Torch's module for graphs, which notes what is done in which order.

    Attributes:
        events: what was done.
        failure: what capturing ends with.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.failure: RuntimeError | None = None
        self.has_ended_before_it_failed = False
        self.is_capturing = False
        self._num_graphs = 0
        self._current = self._stream("main")
        self._underway: set[str] = set()
        self.memory = SimpleNamespace(
            _cuda_endAllocateToPool=self._end_allocating,
            _cuda_releasePool=lambda device, pool: self.events.append(f"release {pool}"),
        )

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def current_stream(self) -> Any:
        return self._current

    def set_stream(self, stream: Any) -> None:
        self._current = stream

    def Stream(self) -> Any:  # torch's name
        return self._stream("side")

    def graph_pool_handle(self) -> str:
        self.events.append("new pool")
        return "pool"

    def CUDAGraph(self) -> Any:  # torch's name
        self._num_graphs += 1
        name = f"graph {self._num_graphs}"
        return SimpleNamespace(name=name, replay=lambda: self.events.append(f"replay {name}"))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.events.append(f"on {stream.name}")
        yield
        self.events.append(f"off {stream.name}")

    def current_device(self) -> int:
        return 0

    def _end_allocating(self, device: int, pool: str) -> None:
        if pool not in self._underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._underway.remove(pool)

    @contextmanager
    def graph(
        self, graph: Any, *, pool: str, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads may not use the GPU"
        if self._underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self._underway.add(pool)
        self.events.append(f"capture {graph.name} in {pool} on {stream.name}")
        before, self._current, self.is_capturing = self._current, stream, True
        try:
            yield
            if self.failure:
                if self.has_ended_before_it_failed:
                    self._end_allocating(0, pool)
                raise self.failure
            # as with torch's, not after a failure
            self._current = before
            self._end_allocating(0, pool)
        finally:
            self.is_capturing = False
            self.events.append("captured")

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.events.append(f"{name} waits for {other.name}"),
        )


GPU = torch.device("cuda", 0)
WARM_RUN = ["side waits for main", "on side", "run", "off side", "main waits for side"]


@pytest.fixture
def cuda() -> PretendCuda:
    return PretendCuda()


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with PretendGpu() as one:
        yield one


def make_recorder(cuda: PretendCuda) -> GraphRecorder:
    """A recorder of graphs that aren't there."""
    return GraphRecorder(GPU, cuda, alias=lambda one: one[:])


def running(cuda: PretendCuda, *outputs: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A function that can be recorded."""

    def run() -> tuple[Tensor, ...]:
        cuda.events.append("run")
        return outputs

    return run


def test_recordings_are_captured_after_a_run_that_compiles_and_share_a_pool(
    cuda: PretendCuda, gpu: PretendGpu
) -> None:
    recorder = make_recorder(cuda)
    results = [gpu.put(torch.full((2, 3), float(index))) for index in range(2)]
    first, second = (recorder.record(running(cuda, result)) for result in results)
    assert cuda.events == [
        "new pool",
        *WARM_RUN,
        *("capture graph 1 in pool on side", "run", "captured"),
        *WARM_RUN,
        *("capture graph 2 in pool on side", "run", "captured"),
    ]
    cuda.events.clear()
    second.replay()
    first.replay()
    assert cuda.events == ["replay graph 2", "replay graph 1"]
    for recording, result in zip((first, second), results, strict=True):
        (output,) = recording.outputs
        assert output is not result
        assert output.data_ptr() == result.data_ptr()


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_waits_for_the_gpu_is_not_recordable(
    cuda: PretendCuda, gpu: PretendGpu, has_ended: bool
) -> None:
    cuda.has_ended_before_it_failed = has_ended
    cuda.failure = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    recorder = make_recorder(cuda)
    with pytest.raises(NotRecordableError, match="such as waiting for the GPU: CUDA error: oper"):
        recorder.record(running(cuda, gpu.put(torch.zeros(2))))
    assert cuda.current_stream().name == "main"
    # its graph does that where it has one
    assert cuda.events.count("release pool") == (not has_ended)
    cuda.failure = None
    assert recorder.record(running(cuda, gpu.put(torch.zeros(2)))).outputs[0].shape == (2,)
    assert cuda.events.count("new pool") == 2, "the pool of a capture that failed is used again"


def test_other_failures_while_capturing_are_not_explained_away(
    cuda: PretendCuda, gpu: PretendGpu
) -> None:
    cuda.failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(torch.OutOfMemoryError):
        make_recorder(cuda).record(running(cuda, gpu.put(torch.zeros(2))))


def test_failures_of_the_function_itself_come_through(cuda: PretendCuda) -> None:
    def run() -> tuple[Tensor, ...]:
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        make_recorder(cuda).record(run)


@pytest.mark.usefixtures("gpu")
def test_results_must_be_whole_tensors_on_the_gpu(cuda: PretendCuda, gpu: PretendGpu) -> None:
    recorder = make_recorder(cuda)
    whole = gpu.put(torch.zeros(4, 4))
    with pytest.raises(NotRecordableError, match="result 1 is on 'cpu', not on the GPU"):
        recorder.record(running(cuda, whole, torch.zeros(2)))
    with pytest.raises(NotRecordableError, match=r"result 0 is a view with gaps: shape \(4, 2\)"):
        recorder.record(running(cuda, whole[:, :2]))


def test_a_recording_within_a_recording_is_refused(cuda: PretendCuda) -> None:
    cuda.is_capturing = True
    with pytest.raises(NotRecordableError, match="something else is being captured already"):
        make_recorder(cuda).record(running(cuda))


def test_nothing_is_recorded_on_a_cpu() -> None:
    recorder = GraphRecorder(torch.device("cpu"))
    with pytest.raises(NotRecordableError, match="as CUDA graphs, and the device is 'cpu'"):
        recorder.record(lambda: (torch.zeros(2),))
