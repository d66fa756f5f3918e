"""Recordings of kernels: the same results as the calls, on whatever their inputs hold."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.api import Kernels, KernelsContext, NotRecordableError, Weight
from hotshoe_kernels.cpu import hotshoe_component

HIDDEN, WIDE, NUM_LAYERS = 96, 200, 5


def build(dtype: torch.dtype, **options: Any) -> Kernels:
    component = hotshoe_component()
    context = KernelsContext(device=torch.device("cpu"), dtype=dtype)
    kernels = component.factory(component.options(**options), context)
    assert isinstance(kernels, Kernels)
    return kernels


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def kernels(dtype: torch.dtype) -> Kernels:
    return build(dtype)


def dense(kernels: Kernels, out_features: int, in_features: int, dtype: torch.dtype) -> Weight:
    values = torch.randn(out_features, in_features).to(dtype) / in_features**0.5
    return kernels.prepare_weight(
        Weight(
            format="dense",
            out_features=out_features,
            in_features=in_features,
            tensors={"weight": values},
        )
    )


@pytest.fixture
def network(kernels: Kernels, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A few blocks with residuals and views, as a model has them."""
    torch.manual_seed(1)
    scale = torch.rand(HIDDEN).to(dtype)
    up = [dense(kernels, 2 * WIDE, HIDDEN, dtype) for _ in range(NUM_LAYERS)]
    down = [dense(kernels, HIDDEN, WIDE, dtype) for _ in range(NUM_LAYERS)]

    def forward(x: Tensor) -> Tensor:
        residual = None
        for layer in range(NUM_LAYERS):
            x, residual = kernels.rms_norm(x, scale, 1e-5, residual)
            wide = kernels.linear(x, up[layer]).view(x.shape[0], 2, WIDE)
            x = kernels.linear(kernels.silu_and_mul(wide.flatten(1)), down[layer])
        return kernels.rms_norm(x, scale, 1e-5, residual)[0]

    return forward


def table_and_ids(kernels: Kernels, dtype: torch.dtype) -> tuple[Weight, Tensor]:
    return dense(kernels, 50, HIDDEN, dtype), torch.tensor([3, 1, 49])


def test_a_replay_gives_what_the_calls_give(
    kernels: Kernels, dtype: torch.dtype, network: Callable[[Tensor], Tensor]
) -> None:
    table, ids = table_and_ids(kernels, dtype)
    recording = kernels.record(lambda: (network(kernels.embedding(ids, table)),))
    for values in ([3, 1, 49], [0, 7, 7], [48, 2, 1]):
        ids.copy_(torch.tensor(values))
        expected = network(kernels.embedding(ids, table))
        recording.replay()
        assert torch.equal(recording.outputs[0], expected)


def test_recordings_take_turns(
    kernels: Kernels, dtype: torch.dtype, network: Callable[[Tensor], Tensor]
) -> None:
    table = dense(kernels, 50, HIDDEN, dtype)
    ids = torch.arange(40) % 50
    sizes = (2, 40, 7)
    recordings = {
        size: kernels.record(lambda size=size: (network(kernels.embedding(ids[:size], table)),))
        for size in sizes
    }
    expected = network(kernels.embedding(ids, table))
    for size in (*sizes, *reversed(sizes)):
        recordings[size].replay()
        assert torch.equal(recordings[size].outputs[0], expected[:size])


def test_one_recording_serves_fewer_rows(
    kernels: Kernels, dtype: torch.dtype, network: Callable[[Tensor], Tensor]
) -> None:
    table = dense(kernels, 50, HIDDEN, dtype)
    ids, rows, scale = torch.arange(40) % 50, torch.arange(7), torch.ones(32, dtype=dtype)

    def run(ids: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        states = network(kernels.embedding(ids, table))
        heads, _ = kernels.rms_norm(states.view(-1, 32), scale, 1e-5)
        some = kernels.take_rows(heads.view(-1, HIDDEN), rows)
        return states, kernels.add(some, some), kernels.argmax(kernels.logits(some, table))

    recording = kernels.record(lambda: run(ids, rows), (40, 7))
    for num_ids, num_rows in ((40, 7), (1, 1), (3, 2), (39, 0), (0, 0), (17, 7), (40, 7)):
        ids.copy_(torch.randint(50, (40,)))
        rows.copy_(torch.randint(max(num_ids, 1), (7,)))
        recording.resize((num_ids, num_rows))
        recording.replay()
        expected = run(ids[:num_ids], rows[:num_rows])
        sizes = (num_ids, num_rows, num_rows)
        for output, size, one in zip(recording.outputs, sizes, expected, strict=True):
            assert torch.equal(output[:size], one)


def test_rows_past_the_size_are_left_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    x, scale = torch.ones(8, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    residual = torch.ones(8, HIDDEN, dtype=dtype)
    recording = kernels.record(lambda: (kernels.rms_norm(x, scale, 1e-5, residual)[0],), (8,))
    recording.resize((3,))
    recording.replay()
    assert residual[:, 0].tolist() == [2, 2, 2, 1, 1, 1, 1, 1]


def test_more_rows_than_recorded_are_refused(kernels: Kernels, dtype: torch.dtype) -> None:
    x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    recording = kernels.record(lambda: (kernels.rms_norm(x, scale, 1e-5)[0],), (4,))
    for size in (5, -1):
        with pytest.raises(ValueError, match="recorded with 4 rows"):
            recording.resize((size,))


@pytest.mark.parametrize("sizes", [(3,), (8,), (4, 2)])
def test_rows_that_are_no_multiple_of_one_size_are_refused(
    kernels: Kernels, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    with pytest.raises(NotRecordableError, match="RmsNorm works on 4 rows, which"):
        kernels.record(lambda: (kernels.rms_norm(x, scale, 1e-5)[0],), sizes)


def test_recording_computes_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    target = torch.ones(4, HIDDEN, dtype=dtype)
    scale = torch.ones(HIDDEN, dtype=dtype)
    kernels.record(lambda: (kernels.rms_norm(target, scale, 1e-5, target)[0],))
    assert torch.equal(target, torch.ones(4, HIDDEN, dtype=dtype))


def test_tensors_that_are_never_alive_together_share_memory(
    kernels: Kernels, dtype: torch.dtype, network: Callable[[Tensor], Tensor]
) -> None:
    table, ids = table_and_ids(kernels, dtype)
    recording = kernels.record(lambda: (network(kernels.embedding(ids, table)),))
    storage = recording.outputs[0].untyped_storage().nbytes()
    one_layer = 3 * (3 * HIDDEN + 3 * WIDE + HIDDEN) * dtype.itemsize
    assert storage < 2 * one_layer + 4096


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.clone(), "clone"),
        (lambda x: x.add_(1), "add_"),
        (lambda x: x.float().double(), "_to_copy"),
    ],
)
def test_torch_operations_are_refused_by_name(
    kernels: Kernels, dtype: torch.dtype, spoil: Callable[[Tensor], Tensor], name: str
) -> None:
    x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    with pytest.raises(NotRecordableError, match=f"torch's {name}"):
        kernels.record(lambda: (spoil(kernels.rms_norm(x, scale, 1e-5)[0]),))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda x: x.double(), "to"),
        (lambda x: x.mT.contiguous(), "contiguous"),
        (lambda x: x.mT.reshape(-1), "reshape"),
        (lambda x: x.view(torch.uint8).tolist(), "resolve_conj"),
        (lambda x: x.view(torch.uint8).numpy(), "resolve_conj"),
        (lambda x: x[0, 0].item(), "item"),
        (lambda x: torch.tensor([1.0, 2.0]), "lift_fresh"),
        (lambda x: torch.from_numpy(np.ones(2)), "lift_fresh"),
    ],
)
def test_copies_and_values_that_look_like_views_are_refused(
    kernels: Kernels, dtype: torch.dtype, spoil: Callable[[Tensor], object], name: str
) -> None:
    x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)

    def forward() -> tuple[Tensor, ...]:
        out = kernels.rms_norm(x, scale, 1e-5)[0]
        spoil(out)
        return (out,)

    with pytest.raises(NotRecordableError, match=f"torch's {name},"):
        kernels.record(forward)


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_is_refused_changes_nothing(
    kernels: Kernels, dtype: torch.dtype, is_inference: bool
) -> None:
    with torch.inference_mode(is_inference):
        x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
        num_calls = torch.zeros(())

        def forward() -> tuple[Tensor, ...]:
            num_calls.add_(1)
            return (kernels.rms_norm(x, scale, 1e-5)[0],)

        with pytest.raises(NotRecordableError, match="torch's add_"):
            kernels.record(forward)
        assert num_calls == 0


def test_a_result_that_no_op_made_is_refused(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.ones(4, HIDDEN, dtype=dtype)
    with pytest.raises(NotRecordableError, match="result"):
        kernels.record(lambda: (x.view(-1),))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Threads of torch, which the option sets too, as they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
def test_ops_on_different_numbers_of_threads_are_refused(dtype: torch.dtype) -> None:
    one, two = build(dtype, num_threads=1), build(dtype, num_threads=2)
    x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    with pytest.raises(NotRecordableError, match=r"different numbers of threads \(1 and 2\)"):
        one.record(lambda: (two.rms_norm(one.rms_norm(x, scale, 1e-5)[0], scale, 1e-5)[0],))


def test_ops_of_several_instruction_sets_are_recorded_together(dtype: torch.dtype) -> None:
    one, two = build(dtype), build(dtype, isa="portable")
    x, scale = torch.randn(4, HIDDEN).to(dtype), torch.rand(HIDDEN).to(dtype)

    def forward() -> tuple[Tensor, ...]:
        return (two.rms_norm(one.rms_norm(x, scale, 1e-5)[0], scale, 1e-5)[0],)

    recording = one.record(forward)
    x.copy_(torch.randn(4, HIDDEN))
    recording.replay()
    assert torch.equal(recording.outputs[0], forward()[0])


def test_recording_does_not_import_torchs_compiler() -> None:
    program = """
        import sys, torch
        from hotshoe.api import KernelsContext
        from hotshoe_kernels.cpu import hotshoe_component

        component = hotshoe_component()
        context = KernelsContext(device=torch.device("cpu"), dtype=torch.float32)
        kernels = component.factory(component.options(), context)
        x, scale = torch.ones(4, 64), torch.ones(64)
        kernels.record(lambda: (kernels.rms_norm(x, scale, 1e-5)[0],))
        print("torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_after_a_refusal_calls_run_again(kernels: Kernels, dtype: torch.dtype) -> None:
    x, scale = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    with pytest.raises(NotRecordableError):
        kernels.record(lambda: (kernels.rms_norm(x, scale, 1e-5)[0] + 1,))
    assert torch.equal(kernels.rms_norm(x, scale, 0.0)[0], x)
