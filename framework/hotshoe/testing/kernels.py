"""The conformance suite of the kernels contract. Subclass it, name your component, and run it with
pytest.

    class TestMyKernels(KernelsConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()

Dtypes and weight formats that the capabilities leave out are skipped.
"""

# T=num_tokens N=out_features K=in_features H=head_dim

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from hotshoe.api import (
    Component,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    NotRecordableError,
    Recording,
    Weight,
)
from hotshoe.testing.random_weights import random_weight

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HEAD_SHAPES_THH = ((1, 3, 1), (5, 4, 2), (9, 3, 3), (2, 1, 1))
QUANTIZED_FORMATS = ("int8", "q8_0", "q4_0", "q4_1")
FORMATS = ("dense", *QUANTIZED_FORMATS)


class KernelsConformance:
    """Everything that ``Kernels`` promises, against float64.

    Attributes:
        device: where to run.
        activation_noise: largest error of a product with quantized weights, relative to the root
            of its terms' summed squares; kernels may quantize activations to 8 bits.
        shapes_NK: of dense weights. Fewer and smaller where each launch takes long.
        quantized_shapes_NK: of weights of every format, K a multiple of 32.
        num_rows: of activations, for dense weights.
        quantized_num_rows: for weights of every format.
        gated_sizes: columns of gates, and of what they gate.
        part_rows: rows of the parts of a merged weight, at least one part for each format.
        head_rows: of a head that is tied to an embedding, at least 6.
    """

    device: ClassVar[str] = "cpu"
    activation_noise: ClassVar[float] = 0.05
    shapes_NK: ClassVar[tuple[tuple[int, int], ...]] = (
        *((1, 1), (32, 64), (33, 7), (64, 63), (70, 96), (129, 130), (3, 257), (200, 576)),
    )
    quantized_shapes_NK: ClassVar[tuple[tuple[int, int], ...]] = ((32, 32), (70, 96), (200, 576))
    num_rows: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 8, 9, 17, 40)
    quantized_num_rows: ClassVar[tuple[int, ...]] = (1, 4, 33)
    gated_sizes: ClassVar[tuple[int, ...]] = (50, 64)
    part_rows: ClassVar[tuple[int, ...]] = (40, 1, 64, 33, 7, 100)
    head_rows: ClassVar[int] = 90

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("override component() in the subclass")

    def options(self) -> dict[str, Any]:
        """Options to build it with."""
        return {}

    @property
    def capabilities(self) -> KernelsCapabilities:
        """What the component says it can do."""
        return cast(KernelsCapabilities, self.component().capabilities)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests of the shapes that subclasses may choose."""
        for name in ("shape_NK", "quantized_shape_NK"):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, getattr(self, name.replace("shape", "shapes")), ids=str)

    @pytest.fixture(params=DTYPES)
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        if request.param not in self.capabilities.dtypes:
            pytest.skip(f"the capabilities leave out {request.param}")
        return DTYPES[request.param]

    @pytest.fixture(params=FORMATS)
    def weight_format(self, request: pytest.FixtureRequest) -> str:
        return self.executable(request.param, self.capabilities.weight_formats)

    @pytest.fixture
    def kernels(self, dtype: torch.dtype) -> Kernels:
        return self.build(dtype)

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    def build(self, dtype: torch.dtype, **options: Any) -> Kernels:
        """The kernels, with further options."""
        component = self.component()
        context = KernelsContext(device=torch.device(self.device), dtype=dtype)
        validated = component.options(**{**self.options(), **options})
        return cast(Kernels, component.factory(validated, context))

    def executable(self, weight_format: str, formats: tuple[str, ...]) -> str:
        """The format; skips the test if it isn't among those."""
        if weight_format not in formats:
            pytest.skip(f"the capabilities leave out {weight_format}")
        return weight_format

    def randn(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape).to(self.device, dtype)

    def weight(
        self, n: int, k: int, dtype: torch.dtype, weight_format: str = "dense", *, bias: bool = True
    ) -> tuple[Weight, Tensor]:
        """A weight that isn't prepared yet, and the values that it stands for."""
        tensors, values = random_weight(weight_format, n, k, dtype)
        if bias:
            tensors["bias"] = torch.randn(n).to(dtype)
        weight = Weight(
            format=weight_format,
            out_features=n,
            in_features=k,
            # prepare_weight may consume its tensors
            tensors={name: one.to(self.device, copy=True) for name, one in tensors.items()},
        )
        return weight, values.to(self.device)

    def assert_product(
        self, output: Tensor, x: Tensor, values: Tensor, bias: Tensor | None, noise: float = 0.0
    ) -> None:
        """Check ``x W^T + b``, rounded to the dtype of x."""
        exact = x.double() @ values.double().T
        sizes = x.double().abs() @ values.double().abs().T
        roots = (x.double().square() @ values.double().square().T).sqrt()
        if bias is not None:
            exact, sizes = exact + bias.double(), sizes + bias.double().abs()
        allowed = torch.finfo(x.dtype).eps * exact.abs() + 2e-6 * sizes + noise * roots
        assert output.shape == exact.shape
        assert output.dtype == x.dtype
        excess = ((output.double() - exact).abs() - allowed).max() if exact.numel() else 0.0
        assert excess <= 0

    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_dense_products_of_any_shape(
        self, kernels: Kernels, dtype: torch.dtype, shape_NK: tuple[int, int], bias: bool
    ) -> None:
        weight, values = self.weight(*shape_NK, dtype, bias=bias)
        bias_N = weight.tensors["bias"].clone() if bias else None
        prepared = kernels.prepare_weight(weight)
        for num_rows in self.num_rows:
            x = self.randn(num_rows, shape_NK[1], dtype=dtype)
            self.assert_product(kernels.linear(x, prepared), x, values, bias_N)

    def test_a_product_of_no_rows_is_empty(self, kernels: Kernels, dtype: torch.dtype) -> None:
        weight, _ = self.weight(40, 64, dtype)
        output = kernels.linear(self.randn(0, 64, dtype=dtype), kernels.prepare_weight(weight))
        assert output.shape == (0, 40)

    def test_products_read_views_and_leave_them_alone(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        weight, values = self.weight(40, 64, dtype, bias=False)
        prepared = kernels.prepare_weight(weight)
        wide = self.randn(9, 200, dtype=dtype)
        before = wide.clone()
        for x in (wide[:, 50:114], wide[::2, :64], wide[:8, :64], wide[3:4, 7:71]):
            self.assert_product(kernels.linear(x, prepared), x, values, None)
        across = self.randn(64, 9, dtype=dtype).T
        self.assert_product(kernels.linear(across, prepared), across, values, None)
        assert torch.equal(wide, before)

    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_products_of_every_format(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        weight_format: str,
        quantized_shape_NK: tuple[int, int],
        bias: bool,
    ) -> None:
        n, k = quantized_shape_NK
        weight, values = self.weight(n, k, dtype, weight_format, bias=bias)
        bias_N = weight.tensors["bias"].clone() if bias else None
        noise = 0.0 if weight_format == "dense" else self.activation_noise
        prepared = kernels.prepare_weight(weight)
        for num_rows in self.quantized_num_rows:
            x = self.randn(num_rows, k, dtype=dtype)
            self.assert_product(kernels.linear(x, prepared), x, values, bias_N, noise)

    def test_parts_of_a_merged_projection_join_by_columns(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        formats = [one for one in FORMATS if one in self.capabilities.weight_formats]
        rows = self.part_rows[: len(formats) + 1]
        made = [
            self.weight(n, 96, dtype, weight_format, bias=index % 2 == 0)
            for index, (n, weight_format) in enumerate(zip(rows, (*formats, "dense"), strict=True))
        ]
        biases = [
            weight.tensors["bias"].clone() if "bias" in weight.tensors else None
            for weight, _ in made
        ]
        prepared = kernels.prepare_weight(
            Weight(
                format="mixed",
                out_features=sum(rows),
                in_features=96,
                tensors={},
                parts=tuple(weight for weight, _ in made),
            )
        )
        for num_rows in self.quantized_num_rows:
            x = self.randn(num_rows, 96, dtype=dtype)
            outputs = torch.split(kernels.linear(x, prepared), list(rows), dim=1)
            for output, (weight, values), bias_N in zip(outputs, made, biases, strict=True):
                noise = 0.0 if weight.format == "dense" else self.activation_noise
                self.assert_product(output, x, values, bias_N, noise)

    def test_prepared_weights_tell_what_they_are(
        self, kernels: Kernels, dtype: torch.dtype, weight_format: str
    ) -> None:
        part, _ = self.weight(40, 64, dtype, weight_format)
        other, _ = self.weight(24, 64, dtype)
        merged = Weight(
            format="mixed", out_features=64, in_features=64, tensors={}, parts=(part, other)
        )
        for weight in (merged, part):
            prepared = kernels.prepare_weight(weight)
            assert prepared.formats == weight.formats
            assert (prepared.out_features, prepared.in_features) == (weight.out_features, 64)

    @pytest.mark.parametrize("weight_format", FORMATS)
    def test_embeddings_are_the_rows_of_a_weight(
        self, kernels: Kernels, dtype: torch.dtype, weight_format: str
    ) -> None:
        self.executable(weight_format, self.capabilities.embedding_formats)
        sizes = (7, 64, 63) if weight_format == "dense" else (32, 64, 576)
        for k in sizes:
            weight, values = self.weight(75, k, dtype, weight_format, bias=False)
            prepared = kernels.prepare_weight(weight)
            token_ids = torch.tensor([3, 74, 0, 31, 32, 3, 63, 64], device=self.device)
            for ids in (token_ids, token_ids[:1], token_ids[:0], token_ids[::2]):
                expected = values[ids].to(dtype)
                output = kernels.embedding(ids, prepared)
                assert output.dtype == dtype
                if weight_format == "dense":
                    assert torch.equal(output, expected)
                else:
                    eps = torch.finfo(dtype).eps
                    torch.testing.assert_close(output, expected, rtol=eps, atol=1e-6)

    @pytest.mark.parametrize("weight_format", FORMATS)
    def test_a_head_and_an_embedding_share_a_weight(
        self, kernels: Kernels, dtype: torch.dtype, weight_format: str
    ) -> None:
        self.executable(weight_format, self.capabilities.embedding_formats)
        self.executable(weight_format, self.capabilities.weight_formats)
        n = self.head_rows
        weight, values = self.weight(n, 64, dtype, weight_format, bias=False)
        prepared = kernels.prepare_weight(weight)
        x = kernels.embedding(torch.tensor([n - 1, 5], device=self.device), prepared)
        noise = 0.0 if weight_format == "dense" else self.activation_noise
        self.assert_product(kernels.linear(x, prepared), x, values, None, noise)

    @pytest.mark.parametrize("size", [1, 15, 16, 64, 100, 576])
    def test_rms_norm_with_and_without_a_residual(
        self, kernels: Kernels, dtype: torch.dtype, size: int
    ) -> None:
        scale = self.randn(size, dtype=dtype)
        for num_rows in (1, 2, 7):
            x = self.randn(num_rows, size, dtype=dtype) * 3
            residual = self.randn(num_rows, size, dtype=dtype)
            before, total = x.clone(), residual + x

            normed, same = kernels.rms_norm(x, scale, 1e-5)
            self.assert_normed(normed, x, scale)
            assert torch.equal(same, before)

            normed, summed = kernels.rms_norm(x, scale, 1e-5, residual)
            self.assert_normed(normed, total, scale)
            assert torch.equal(summed, total)
            assert torch.equal(x, before)

    def test_rms_norm_of_views_and_of_heads(self, kernels: Kernels, dtype: torch.dtype) -> None:
        packed = self.randn(6, 5 * 48, dtype=dtype)
        residual = self.randn(6, 3 * 48, dtype=dtype)
        scale = self.randn(48, dtype=dtype)
        rows, heads = packed[:, 48:96], packed.view(6, 5, 48)[:, ::2]
        total_rows = residual[:, 48:96] + rows
        for view in (rows, heads):
            normed, _ = kernels.rms_norm(view, scale, 1e-5)
            self.assert_normed(normed, view, scale)
        normed, summed = kernels.rms_norm(rows, scale, 1e-5, residual[:, 48:96])
        self.assert_normed(normed, total_rows, scale)
        assert torch.equal(summed, total_rows)

    def assert_normed(self, normed: Tensor, x: Tensor, scale: Tensor, eps: float = 1e-5) -> None:
        """Check a norm over the last dimension, rounded to the dtype of x."""
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
        exact = exact * scale.double()
        assert normed.dtype == x.dtype
        rtol = max(torch.finfo(x.dtype).eps, 1e-6)
        torch.testing.assert_close(normed.double(), exact, rtol=rtol, atol=1e-7)

    @pytest.mark.parametrize("rotary_dim", [2, 32, 50, 64])
    def test_rope_turns_the_first_dimensions_of_heads(
        self, kernels: Kernels, dtype: torch.dtype, rotary_dim: int
    ) -> None:
        half = rotary_dim // 2
        frequencies = 1000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(64.0), frequencies).to(self.device)
        for num_tokens, num_heads, num_kv_heads in HEAD_SHAPES_THH:
            q = self.randn(num_tokens, num_heads, 80, dtype=dtype)[..., 8:72]
            k, v = self.randn(num_tokens, 2 * num_kv_heads, 64, dtype=dtype).chunk(2, dim=1)
            v_before = v.clone()
            positions = torch.randint(0, 64, (num_tokens,)).to(self.device)
            expected = [_rotated(one, angles[positions]) for one in (q, k)]

            rotated = kernels.rope(q, k, positions, angles.cos(), angles.sin())

            # a table that is rounded to the dtype, and a rounding after each operation, are allowed
            atol = 12 * max(torch.finfo(dtype).eps, 1e-7)
            for output, (exact, rest) in zip(rotated, expected, strict=True):
                assert output.dtype == dtype
                turned = output[..., :rotary_dim].double()
                torch.testing.assert_close(turned, exact, atol=atol, rtol=0)
                assert torch.equal(output[..., rotary_dim:], rest)
            assert torch.equal(v, v_before)

    @pytest.mark.parametrize("size", [1, 15, 32, 100, 1536])
    def test_silu_and_mul_takes_the_gate_first(
        self, kernels: Kernels, dtype: torch.dtype, size: int
    ) -> None:
        for num_rows in (1, 2, 7):
            wide = self.randn(num_rows, 2 * size + 5, dtype=dtype) * 3
            before = wide.clone()
            for x in (wide[:, : 2 * size].contiguous(), wide[:, 5:]):
                gate, up = x.double().chunk(2, -1)
                exact = gate * gate.sigmoid() * up
                output = kernels.silu_and_mul(x)
                # torch rounds between the two operations
                rtol = 2 * max(torch.finfo(dtype).eps, 1e-6)
                assert output.dtype == dtype
                torch.testing.assert_close(output.double(), exact, rtol=rtol, atol=1e-6)
            assert torch.equal(wide, before)

    def test_gated_products_are_silu_and_mul_of_products(
        self, kernels: Kernels, dtype: torch.dtype, weight_format: str
    ) -> None:
        for size in self.gated_sizes:
            weight, _ = self.weight(2 * size, 64, dtype, weight_format)
            prepared = kernels.prepare_weight(weight)
            for num_rows in (0, *self.quantized_num_rows):
                x = self.randn(num_rows, 64, dtype=dtype) / 4
                product = kernels.linear(x, prepared)
                gate, up = product.double().chunk(2, -1)
                output = kernels.linear_silu_and_mul(x, prepared)
                assert output.shape == (num_rows, size)
                assert output.dtype == dtype
                # one rounding or three: the slope of silu is at most 1.1
                allowed = 4 * torch.finfo(dtype).eps * (gate * up).abs() + 1e-6
                error = (output.double() - kernels.silu_and_mul(product).double()).abs()
                assert (error <= allowed).all()

    def test_silu_of_large_numbers(self, kernels: Kernels, dtype: torch.dtype) -> None:
        gate = torch.tensor([[-3e4, -100, -88, -20, 0, 20, 88, 100, 3e4]], device=self.device)
        output = kernels.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), 1).to(dtype))
        expected = gate.clamp(min=0).to(dtype)
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=torch.finfo(dtype).eps)

    @pytest.mark.parametrize("size", [1, 15, 32, 300])
    def test_silu_and_add_make_new_tensors(
        self, kernels: Kernels, dtype: torch.dtype, size: int
    ) -> None:
        for num_rows in (1, 2, 7):
            wide = self.randn(num_rows, 2 * size + 5, dtype=dtype) * 3
            before = wide.clone()
            x, y = wide[:, :size], wide[:, size + 5 :]
            exact = x.double() * x.double().sigmoid()
            output = kernels.silu(x)
            rtol = max(torch.finfo(dtype).eps, 1e-6)
            assert output.dtype == dtype
            torch.testing.assert_close(output.double(), exact, rtol=rtol, atol=1e-6)
            assert torch.equal(kernels.add(x, y), x + y)
            assert torch.equal(wide, before)

    @pytest.mark.parametrize("widths", [(5,), (64, 64), (1, 96, 3), (7, 32, 64, 200)], ids=str)
    def test_concat_puts_views_and_wholes_side_by_side(
        self, kernels: Kernels, dtype: torch.dtype, widths: tuple[int, ...]
    ) -> None:
        for num_rows in (0, 1, 2, 9):
            wide = self.randn(num_rows, 300, dtype=dtype)
            tensors = [
                wide[:, width : 2 * width] if index % 2 else wide[:, :width].contiguous()
                for index, width in enumerate(widths)
            ]
            output = kernels.concat(tensors)
            assert output.dtype == dtype
            assert torch.equal(output, torch.cat(tensors, 1))

    def test_take_rows_copies_rows_of_any_dtype(self, kernels: Kernels, dtype: torch.dtype) -> None:
        rows = torch.tensor([8, 0, 3, 3, 5], device=self.device)
        wide = self.randn(9, 200, dtype=dtype)
        for x in (wide, wide[:, 50:114], wide.float()[:, :7], (wide * 100).long()):
            for some in (rows, rows[:1], rows[:0], rows[::2]):
                output = kernels.take_rows(x, some)
                assert output.dtype == x.dtype
                assert torch.equal(output, x[some])

    @pytest.mark.parametrize("logits_dtype", ["of activations", "float32"])
    def test_argmax_takes_the_lowest_of_equal_values(
        self, kernels: Kernels, dtype: torch.dtype, logits_dtype: str
    ) -> None:
        for size in (1, 15, 64, 1500, 5000):
            # few distinct values: most rows have their largest one more than once
            values = torch.randint(-9, 9, (9, size), device=self.device)
            x = values.to(dtype if logits_dtype == "of activations" else torch.float32)
            expected = torch.tensor([row.index(max(row)) for row in values.tolist()])
            output = kernels.argmax(x)
            assert output.dtype == torch.int64
            assert torch.equal(output.cpu(), expected)

    def test_argmax_of_zeros_infinities_and_nan(self, kernels: Kernels, dtype: torch.dtype) -> None:
        inf, nan = float("inf"), float("nan")
        x = torch.tensor(
            [[-0.0, 0.0, -1, 0], [-inf, -inf, -inf, -inf], [1, inf, 2, inf], [3, nan, inf, nan]]
        )
        output = kernels.argmax(x.to(self.device, dtype))
        assert output.tolist() == [0, 0, 1, 1]

    def test_results_do_not_depend_on_the_batch(self, kernels: Kernels, dtype: torch.dtype) -> None:
        if not self.capabilities.is_batch_invariant:
            pytest.skip("the capabilities don't claim batch invariance")
        num_tokens, k = 67, 256
        x = self.randn(num_tokens, k, dtype=dtype)
        residual, scale = self.randn(num_tokens, k, dtype=dtype), self.randn(k, dtype=dtype)
        positions = torch.arange(num_tokens, device=self.device)
        angles = torch.rand(num_tokens, 32, device=self.device)
        weights = [
            kernels.prepare_weight(self.weight(n, k, dtype, weight_format)[0])
            for weight_format in FORMATS
            if weight_format in self.capabilities.weight_formats
            for n in (40, 320)
        ]

        def results(rows: slice) -> list[Tensor]:
            heads = x[rows].view(-1, 4, 64)
            rotated = kernels.rope(
                heads[:, :3].clone(), heads[:, 3:].clone(), positions[rows], angles, angles
            )
            return [
                *(kernels.linear(x[rows], weight) for weight in weights),
                *kernels.rms_norm(x[rows], scale, 1e-5, residual[rows].clone()),
                *rotated,
                *(kernels.linear_silu_and_mul(x[rows], weight) for weight in weights),
                kernels.silu_and_mul(x[rows]),
                kernels.silu(x[rows]),
                kernels.add(x[rows], residual[rows]),
                kernels.argmax(x[rows]),
            ]

        together = results(slice(None))
        sizes = (1, 2, 3, 6, 9, 13, 33)
        for begin, size in zip((0, *torch.tensor(sizes).cumsum(0).tolist()), sizes, strict=False):
            rows = slice(begin, begin + size)
            for alone, batch in zip(results(rows), together, strict=True):
                assert torch.equal(alone, batch[rows])

    def test_a_recording_computes_what_the_calls_compute(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        weights = [self.weight(n, k, dtype)[0] for n, k in ((75, 64), (128, 64), (64, 64))]
        table, up, down = map(kernels.prepare_weight, weights)
        scale = self.randn(64, dtype=dtype)
        token_ids = torch.zeros(5, dtype=torch.int64, device=self.device)
        run = self.block(kernels, token_ids, table, up, down, scale)
        recording = self.recorded(kernels, run)
        for seed in range(3):
            torch.manual_seed(seed)
            token_ids.copy_(torch.randint(0, 75, (5,)))
            recording.replay()
            for replayed, computed in zip(recording.outputs, run(), strict=True):
                assert torch.equal(replayed, computed)

    def test_a_recording_follows_its_own_choices(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        weights = [self.weight(n, k, dtype)[0] for n, k in ((75, 64), (64, 128), (40, 64))]
        table, mix, head = map(kernels.prepare_weight, weights)
        logits = torch.zeros(6, 75, device=self.device)
        states = torch.zeros(6, 64, dtype=dtype, device=self.device)
        choices = self.randn(40, 3, dtype=dtype)
        rows = torch.tensor([5, 0, 2], device=self.device)

        def run() -> tuple[Tensor, ...]:
            token_ids = kernels.argmax(logits)
            x = kernels.add(kernels.embedding(token_ids, table), states)
            x = kernels.linear(kernels.concat((kernels.silu(x), states)), mix)
            last = kernels.take_rows(x, rows)
            scores = kernels.logits(last, head)
            best = kernels.argmax(scores)
            return token_ids, last, best, kernels.take_rows(choices, best), scores

        recording = self.recorded(kernels, run)
        for seed in range(3):
            torch.manual_seed(seed)
            logits.copy_(torch.randn(6, 75))
            states.copy_(torch.randn(6, 64))
            rows.copy_(torch.randint(0, 6, (3,)))
            recording.replay()
            for replayed, computed in zip(recording.outputs, run(), strict=True):
                assert torch.equal(replayed, computed)

    def test_a_recording_of_any_size_computes_fewer_rows(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        if self.capabilities.recording != "any_size":
            pytest.skip("recordings have one size")
        weights = [self.weight(n, k, dtype)[0] for n, k in ((75, 64), (128, 64), (64, 64))]
        table, up, down = map(kernels.prepare_weight, weights)
        scale, head_scale = self.randn(64, dtype=dtype), self.randn(16, dtype=dtype)
        token_ids = torch.zeros(9, dtype=torch.int64, device=self.device)
        rows = torch.zeros(5, dtype=torch.int64, device=self.device)

        def run(num_tokens: int, num_rows: int) -> tuple[Tensor, ...]:
            ids = token_ids[:num_tokens]
            x, scores = self.block(kernels, ids, table, up, down, scale)()
            heads, _ = kernels.rms_norm(x.view(-1, 16), head_scale, 1e-5)
            some = kernels.take_rows(heads.view(-1, 64), rows[:num_rows])
            return scores, kernels.logits(kernels.add(kernels.silu(some), some), table)

        recording = kernels.record(lambda: run(9, 5), (9, 5))
        for seed, sizes in enumerate(((9, 5), (1, 1), (7, 2), (3, 0), (8, 5), (9, 3))):
            torch.manual_seed(seed)
            token_ids.copy_(torch.randint(0, 75, (9,)))
            rows.copy_(torch.randint(0, sizes[0], (5,)))
            recording.resize(sizes)
            recording.replay()
            for replayed, size, computed in zip(recording.outputs, sizes, run(*sizes), strict=True):
                assert torch.equal(replayed[:size], computed)
        with pytest.raises(ValueError, match="9"):
            recording.resize((10, 5))

    def recorded(self, kernels: Kernels, run: Callable[[], tuple[Tensor, ...]]) -> Recording:
        """The recording; skips the test if the kernels make none."""
        if self.capabilities.recording == "none":
            with pytest.raises(NotRecordableError):
                kernels.record(run)
            pytest.skip("the capabilities say that nothing is recorded")
        try:
            return kernels.record(run)
        except NotRecordableError as error:
            pytest.skip(str(error))

    def block(
        self,
        kernels: Kernels,
        token_ids: Tensor,
        table: Weight,
        up: Weight,
        down: Weight,
        scale: Tensor,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Something like a layer of a model."""

        def run() -> tuple[Tensor, ...]:
            x, residual = kernels.rms_norm(kernels.embedding(token_ids, table), scale, 1e-5)
            x = kernels.linear(kernels.silu_and_mul(kernels.linear(x, up)), down)
            x = kernels.linear(kernels.linear_silu_and_mul(x, up), down)
            x, _ = kernels.rms_norm(x, scale, 1e-5, residual)
            return x, kernels.linear(x, table)

        return run


def _rotated(heads: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated dimensions in float64, and the others."""
    half = angles.shape[1]
    first, second = heads[..., :half].double(), heads[..., half : 2 * half].double()
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned, heads[..., 2 * half :].clone()
