"""Attention in Triton: its results in the interpreter, and that its kernels compile for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from hotshoe.api import AttentionBatch, AttentionContext, AttentionSpec
from hotshoe.testing.attention import make_spec
from hotshoe.testing.attention_reference import LayerFacts
from hotshoe_attention import triton
from hotshoe_attention.triton.backend import TritonAttentionBackend
from hotshoe_attention.triton.options import TritonAttentionOptions
from hotshoe_attention.triton.tiles import Gpu
from hotshoe_attention.triton.tuning import KeptSizes, Measure, tuned
from hotshoe_triton.compile_only import CAPABILITIES, CompiledLaunch, compile_only
from interpreted.run import run_interpreted

GPUS = {
    80: Gpu(capability=80, num_processors=108, shared_bytes=163 * 1024),
    86: Gpu(capability=86, num_processors=82, shared_bytes=99 * 1024),
    90: Gpu(capability=90, num_processors=132, shared_bytes=227 * 1024),
    100: Gpu(capability=100, num_processors=148, shared_bytes=227 * 1024),
}
HALF = ("bfloat16", "float16")

CASES = {
    "bfloat16": (90, make_spec(32, 8, 128, dtype="bfloat16")),
    "head-80-on-ampere": (80, make_spec(16, 4, 80, dtype="bfloat16", softcap=50.0)),
    "int8-on-blackwell": (
        100,
        make_spec(8, 8, 96, head_dim_v=64, dtype="bfloat16", kv_dtype="int8", has_sinks=True),
    ),
    "head-256": (90, make_spec(16, 8, 256, dtype="bfloat16", sliding_window=512, softcap=30.0)),
    "one-kv-head": (90, make_spec(71, 1, 64, dtype="float16", kv_dtype="bfloat16")),
    "float32": (80, make_spec(9, 3, 64, dtype="float32")),
}


@pytest.mark.slow
def test_the_conformance_suite_passes_in_the_interpreter() -> None:
    run_interpreted("attention.py")


@pytest.fixture(scope="module", autouse=True)
def cold_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Triton has compiled before doesn't count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_steps_with_prompts_and_without(case: str) -> None:
    capability, spec = CASES[case]
    decode = compiled(capability, spec, num_tokens=1)
    assert [launch.name for launch in decode] == ["write_and_plan", "attend_parts"]
    mixed = compiled(capability, spec, num_tokens=512)
    assert [launch.name for launch in mixed] == ["write_and_plan", "attend_parts", "attend_tiles"]
    if spec.dtype != "float32":
        spilled = {launch.name: launch.local_bytes for launch in (*decode, *mixed)}
        assert max(spilled.values()) < 64, f"registers are spilled: {spilled}"


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks", "rotated-in-part"])
def test_kernels_compile_for_everything(
    capability: int, head_dim: int, dtype: str, kind: str
) -> None:
    spec = make_spec(
        32,
        8,
        head_dim,
        dtype=dtype,
        sliding_window=1024 if kind == "window" else None,
        softcap=50.0 if kind == "softcap" else None,
        has_sinks=kind == "sinks",
    )
    rotary_dim = head_dim // 2 if kind == "rotated-in-part" else head_dim
    for num_tokens in (1, 5, 512, 2048):
        assert compiled(capability, spec, num_tokens=num_tokens, rotary_dim=rotary_dim)


def test_drafts_are_verified_without_a_launch_for_prompts() -> None:
    launches = compiled(*CASES["bfloat16"], num_tokens=8)
    assert [launch.name for launch in launches] == ["write_and_plan", "attend_parts"]


def test_grids_for_long_contexts_fill_the_gpu_and_not_much_more() -> None:
    _, spec = CASES["bfloat16"]
    for num_reqs in (1, 32, 256):
        _, launch = compiled(90, spec, num_tokens=1, num_reqs=num_reqs, max_seq_len=131072)
        num_programs = launch.grid[0] * launch.grid[1]
        assert 3 * 132 <= num_programs <= 8 * num_reqs + 13 * 132


@pytest.mark.parametrize(
    ("num_heads", "num_tokens"), [(8, 512), (32, 8)], ids=["prompts", "drafts"]
)
def test_tiles_fit_into_the_shared_memory_of_small_gpus(num_heads: int, num_tokens: int) -> None:
    spec = make_spec(num_heads, 2, 256, dtype="bfloat16")
    for launch in compiled(80, spec, num_tokens=num_tokens, gpu=GPUS[86]):
        assert launch.shared_bytes <= GPUS[86].shared_bytes, launch.name


def test_without_triton_the_component_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotshoe_triton.runtime.find_spec", lambda name: None)
    (reason,) = triton.hotshoe_component().unsupported
    assert reason.startswith("the package triton is not installed; pip install triton")


def test_a_cpu_is_refused_with_the_reason() -> None:
    assert triton.hotshoe_component().capabilities.devices == ("cuda",)
    backend = make_backend(torch.device("cpu"), GPUS[90])
    reasons = backend.supports(make_spec())
    assert reasons == ["device 'cpu' is not one of ('cuda',)"]


def test_shapes_that_no_kernel_is_made_for_are_refused() -> None:
    backend = make_backend(torch.device("cuda"), GPUS[90])
    assert backend.supports(make_spec(head_dim=1024)) == ["head_dim 1024 is more than 512"]
    assert backend.supports(make_spec(4, 3)) == ["4 heads are not a multiple of 3 KV heads"]
    assert backend.supports(make_spec(scale=-1.0)) == ["scale -1.0 is not positive"]


@pytest.mark.parametrize(
    ("option", "size", "reason"),
    [
        ("prefill_block_n", 48, "48 is not a power of two"),
        ("decode_num_warps", 3, "3 is not a power of two"),
        ("decode_block_n", 8, "greater than or equal to 16"),
        ("prefill_num_warps", 64, "less than or equal to 32"),
    ],
)
def test_sizes_that_no_kernel_can_have_are_refused(option: str, size: int, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TritonAttentionOptions.model_validate({option: size})


def prefer_few_warps(calls: list[str]) -> Measure:
    """A measurement that finds the fewest warps and the shortest tiles quickest."""

    def measure(phase: str, options: TritonAttentionOptions) -> float:
        calls.append(phase)
        sizes = options.model_dump()
        return float(1000 * sizes[f"{phase}_num_warps"] + sizes[f"{phase}_block_n"])

    return measure


SPEC = make_spec(32, 8, 128, dtype="bfloat16")


def test_the_quickest_sizes_are_measured_once_and_kept(tmp_path: Path) -> None:
    calls: list[str] = []
    path = tmp_path / "of" / "a-gpu.json"
    for _ in range(2):
        options = tuned(
            SPEC, GPUS[90], TritonAttentionOptions(), KeptSizes(path), prefer_few_warps(calls)
        )
        assert (options.decode_num_warps, options.decode_block_n) == (2, 32)
        assert (options.prefill_num_warps, options.prefill_block_n) == (4, 32)
    num_calls = len(calls)
    assert set(calls) == {"prefill", "decode"}
    tuned(SPEC, GPUS[90], TritonAttentionOptions(), KeptSizes(path), prefer_few_warps(calls))
    assert len(calls) == num_calls
    other = make_spec(8, 8, 64, dtype="bfloat16")
    tuned(other, GPUS[90], TritonAttentionOptions(), KeptSizes(path), prefer_few_warps(calls))
    assert len(calls) > num_calls


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"KEY": 3}', '{"KEY": {"decode_block_n": "32"}}', '{"KEY": {}}', "\x00"],
)
def test_a_broken_file_of_sizes_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text.replace("KEY", f"decode {SPEC}"))
    options = tuned(SPEC, GPUS[90], TritonAttentionOptions(), KeptSizes(path), prefer_few_warps([]))
    assert options.decode_block_n == 32
    calls: list[str] = []
    tuned(SPEC, GPUS[90], TritonAttentionOptions(), KeptSizes(path), prefer_few_warps(calls))
    assert calls == []


def test_sizes_that_are_given_are_not_measured(tmp_path: Path) -> None:
    calls: list[str] = []
    given = TritonAttentionOptions(decode_block_n=128)
    options = tuned(
        SPEC, GPUS[90], given, KeptSizes(tmp_path / "kept.json"), prefer_few_warps(calls)
    )
    assert options.decode_block_n == 128
    assert options.decode_num_warps is None
    assert set(calls) == {"prefill"}


def test_sizes_are_used_where_they_cannot_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    kept = KeptSizes(tmp_path / "file" / "kept.json")
    options = tuned(SPEC, GPUS[90], TritonAttentionOptions(), kept, prefer_few_warps([]))
    assert options.decode_block_n == 32
    assert "sizes that were measured can't be kept" in caplog.text


def test_every_gpu_and_version_of_triton_has_a_file_of_its_own(tmp_path: Path) -> None:
    for gpu_name, version in (
        ("NVIDIA H200", "3.7.1"),
        ("NVIDIA H200", "3.6.0"),
        ("A100", "3.7.1"),
    ):
        kept = KeptSizes.on_this_machine(tmp_path, gpu_name, version)
        assert kept.get("key") is None
        kept.put("key", {"block_n": 32})
    assert len(list(tmp_path.rglob("*.json"))) == 3


def make_backend(
    device: torch.device, gpu: Gpu, options: TritonAttentionOptions | None = None
) -> TritonAttentionBackend:
    """A backend of an engine of usual size."""
    context = AttentionContext(
        device=device,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=131072,
    )
    return TritonAttentionBackend(
        options or TritonAttentionOptions(), triton.capabilities(), context, gpu
    )


def compiled(
    capability: int,
    spec: AttentionSpec,
    *,
    num_tokens: int,
    num_reqs: int = 8,
    max_seq_len: int = 32768,
    rotary_dim: int | None = None,
    gpu: Gpu | None = None,
) -> list[CompiledLaunch]:
    """What a layer launches in a step of so many tokens for each request."""
    backend = make_backend(torch.device("cuda"), gpu or GPUS[capability])
    assert backend.supports(spec) == []
    kv, dtype = spec.kv, getattr(torch, spec.dtype)
    total = num_reqs * num_tokens
    batch = AttentionBatch(
        query_start_loc=meta(num_reqs + 1, dtype=torch.int32),
        seq_lens=meta(num_reqs, dtype=torch.int32),
        block_table=meta(num_reqs, max_seq_len // 16, dtype=torch.int32),
        slot_mapping=meta(total, dtype=torch.int64),
        positions=meta(total, dtype=torch.int64),
        block_size=16,
        max_query_len=num_tokens,
        max_seq_len=max_seq_len,
        query_lens_list=(),
        seq_lens_list=(),
    )
    half = (kv.head_dim if rotary_dim is None else rotary_dim) // 2
    table = meta(131072, half, dtype=torch.float32)
    sinks = meta(spec.num_heads, dtype=torch.float32) if spec.has_sinks else None
    q = meta(total, spec.num_heads, kv.head_dim, dtype=dtype)
    k = meta(total, kv.num_kv_heads, kv.head_dim, dtype=dtype)
    v = meta(total, kv.num_kv_heads, kv.head_dim_v, dtype=dtype)
    cache = {
        one.name: meta(64, *one.block_shape, dtype=getattr(torch, one.dtype))
        for one in backend.layout(spec).tensors
    }
    with compile_only(capability) as launches:
        metadata = backend.build_metadata(batch, kv)
        backend.forward(LayerFacts(spec, sinks, (table, table)), q, k, v, cache, metadata)
    return launches


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
