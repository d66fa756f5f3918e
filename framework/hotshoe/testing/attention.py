"""The conformance suite of the attention contract. Subclass it, name your component, and run it
with pytest.

    class TestMyAttention(AttentionConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()

What the backend's ``supports`` refuses is skipped, with its reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest
import torch

from hotshoe.api import (
    AttentionBackend,
    AttentionContext,
    AttentionSpec,
    Component,
    KVCacheSpec,
)
from hotshoe.testing.attention_reference import TOLERANCES, LayerFacts, Padding, PagedRun

BLOCK_SIZE = 16


def make_spec(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    *,
    head_dim_v: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionSpec:
    """An attention spec from the few things a test cares about."""
    return AttentionSpec(
        num_heads=num_heads,
        kv=KVCacheSpec(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v or head_dim,
            dtype=kv_dtype or dtype,
            sliding_window=sliding_window,
        ),
        scale=head_dim**-0.5 if scale is None else scale,
        dtype=dtype,
        softcap=softcap,
        has_sinks=has_sinks,
    )


SPECS = {
    "gqa-2": make_spec(),
    "mha": make_spec(4, 4, 64),
    "gqa-3": make_spec(9, 3, 64),
    "gqa-7": make_spec(14, 2, 64),
    "mqa": make_spec(8, 1, 64),
    "head-16": make_spec(head_dim=16),
    "head-32": make_spec(head_dim=32),
    "head-80": make_spec(head_dim=80),
    "head-96": make_spec(head_dim=96),
    "head-128": make_spec(head_dim=128),
    "head-256": make_spec(head_dim=256),
    "narrow-values": make_spec(head_dim=96, head_dim_v=64),
    "wide-values": make_spec(head_dim=32, head_dim_v=64),
    "window-1": make_spec(sliding_window=1),
    "window-5": make_spec(sliding_window=5),
    "window-33": make_spec(sliding_window=33),
    "scale": make_spec(scale=0.3),
    "softcap": make_spec(softcap=2.0),
    "sinks": make_spec(has_sinks=True),
    "softcap-window": make_spec(softcap=2.0, sliding_window=20),
    "sinks-window": make_spec(has_sinks=True, sliding_window=20),
    "bfloat16": make_spec(dtype="bfloat16"),
    "bfloat16-window": make_spec(dtype="bfloat16", sliding_window=20),
    "bfloat16-softcap-sinks": make_spec(dtype="bfloat16", softcap=2.0, has_sinks=True),
    "float16": make_spec(dtype="float16"),
    "float32-on-bfloat16": make_spec(dtype="float32", kv_dtype="bfloat16"),
    "bfloat16-on-float32": make_spec(dtype="bfloat16", kv_dtype="float32"),
    "float32-on-int8": make_spec(head_dim=80, dtype="float32", kv_dtype="int8"),
    "bfloat16-on-int8": make_spec(dtype="bfloat16", kv_dtype="int8"),
}


class AttentionConformance:
    """Everything that ``AttentionBackend`` promises, against dense attention in float64.

    Attributes:
        device: where to run.
        spec_names: of ``SPECS``, which the tests that take a spec go through; fewer where they run
            slowly.
        block_sizes: for the tests that vary it.
        long_context: length of the longest request.
    """

    device: ClassVar[str] = "cpu"
    spec_names: ClassVar[Sequence[str]] = tuple(SPECS)
    block_sizes: ClassVar[tuple[int, ...]] = (4, 8, 16, 32, 64)
    long_context: ClassVar[int] = 1300

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("override component() in the subclass")

    def options(self) -> dict[str, Any]:
        """Options to build it with."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each test."""
        if "spec" in metafunc.fixturenames:
            specs = [SPECS[name] for name in self.spec_names]
            metafunc.parametrize("spec", specs, ids=self.spec_names)

    def backend(self, block_size: int = BLOCK_SIZE) -> AttentionBackend:
        """Build the backend."""
        component = self.component()
        context = AttentionContext(
            device=torch.device(self.device),
            block_size=block_size,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=8192,
        )
        return cast(
            AttentionBackend, component.factory(component.options(**self.options()), context)
        )

    def start(
        self,
        spec: AttentionSpec,
        *,
        block_size: int = BLOCK_SIZE,
        num_blocks: int = 64,
        seed: int = 0,
        rotary_dim: int = 0,
    ) -> PagedRun:
        """A run of one layer; skips the test if the backend refuses the spec."""
        backend = self.backend(block_size)
        reasons = backend.supports(spec)
        if reasons:
            pytest.skip("; ".join(reasons))
        device = torch.device(self.device)
        sinks = cos_sin = None
        if spec.has_sinks:
            sinks = torch.linspace(-1, 2, spec.num_heads, device=device)
        if rotary_dim:
            frequencies = 10000.0 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
            angles = torch.outer(torch.arange(512.0), frequencies).to(device)
            cos_sin = (angles.cos(), angles.sin())
        layer = LayerFacts(spec, sinks, cos_sin)
        return PagedRun(backend, layer, block_size, num_blocks, device, seed, self.tolerance(spec))

    def start_padded(self, spec: AttentionSpec) -> PagedRun:
        """Likewise; skips the test if the backend takes no padding."""
        if not self.backend().capabilities.takes_padding:
            pytest.skip("the backend takes no padding")
        return self.start(spec)

    def start_with_fewer_queries(
        self, spec: AttentionSpec, *, num_blocks: int = 64, rotary_dim: int = 0
    ) -> PagedRun:
        """Likewise; skips the test if the backend attends from every token."""
        if not self.backend().capabilities.takes_fewer_queries:
            pytest.skip("the backend takes no fewer queries than tokens")
        return self.start(spec, num_blocks=num_blocks, rotary_dim=rotary_dim)

    def tolerance(self, spec: AttentionSpec) -> float:
        """Largest allowed difference to the reference, which knows how the pages round: by default
        that of the coarser dtype, since a backend may compute in either.
        """
        return max(TOLERANCES[spec.dtype], TOLERANCES[spec.kv.dtype])

    def test_whole_prompts(self, spec: AttentionSpec) -> None:
        self.start(spec).step({"a": 1, "b": 7, "c": 16, "d": 45, "e": 2})

    def test_single_token_steps_over_unequal_lengths(self, spec: AttentionSpec) -> None:
        run = self.start(spec)
        run.step({"a": 1, "b": 15, "c": 16, "d": 70})
        for _ in range(3):
            run.step({"a": 1, "b": 1, "c": 1, "d": 1})
        run.step({"d": 1, "a": 1})

    def test_equal_lengths_and_a_batch_of_one(self, spec: AttentionSpec) -> None:
        run = self.start(spec)
        run.step({"a": 21, "b": 21, "c": 21})
        run.step({"a": 1, "b": 1, "c": 1})
        run.step({"b": 1})

    def test_chunks_on_a_paged_cache(self, spec: AttentionSpec) -> None:
        run = self.start(spec)
        run.step({"a": 10, "b": 40})
        run.step({"b": 5, "a": 37})
        run.step({"a": 2, "b": 3})

    def test_chunks_prompts_and_single_tokens_in_one_batch(self, spec: AttentionSpec) -> None:
        run = self.start(spec)
        run.step({"a": 30, "b": 18})
        run.step({"a": 1, "new": 25, "b": 6, "newer": 1})
        run.step({"b": 1, "newer": 4, "a": 1, "newest": 3, "new": 1})

    @pytest.mark.parametrize("name", ["gqa-2", "window-5", "bfloat16"])
    def test_every_block_size(self, name: str) -> None:
        refused = {}
        for block_size in self.block_sizes:
            reasons = self.backend(block_size).supports(SPECS[name])
            if reasons:
                refused[block_size] = reasons
                continue
            run = self.start(SPECS[name], block_size=block_size)
            run.step({"a": block_size, "b": 2 * block_size + 1, "c": block_size - 1})
            run.step({"c": 2, "a": 1, "b": block_size})
            run.step({"a": 1, "b": 1, "c": 1})
        if len(refused) == len(self.block_sizes):
            pytest.skip(f"refused at every block size: {refused}")

    @pytest.mark.parametrize("name", ["gqa-2", "window-33", "softcap", "bfloat16"])
    def test_long_context(self, name: str) -> None:
        length = self.long_context
        run = self.start(SPECS[name], num_blocks=2 * length // BLOCK_SIZE + 4)
        run.step({"long": length - 40, "short": 3})
        run.step({"short": 1, "long": 38})
        run.step({"long": 1, "short": 1})

    @pytest.mark.parametrize("name", ["gqa-2", "window-5", "sinks", "bfloat16"])
    def test_a_result_does_not_depend_on_the_rest_of_the_batch(self, name: str) -> None:
        alone, together = self.start(SPECS[name]), self.start(SPECS[name])
        together.step({"b": 60, "c": 2})
        for query_len, others in ((19, {"b": 1, "new": 30}), (1, {"c": 1, "b": 1}), (4, {"b": 9})):
            expected = alone.step({"a": query_len})["a"]
            output = together.step({**others, "a": query_len, "c": 1})["a"]
            tolerance = TOLERANCES[SPECS[name].dtype]
            torch.testing.assert_close(output, expected, atol=tolerance, rtol=0)

    def test_requests_that_share_prefix_blocks(self) -> None:
        run = self.start(SPECS["gqa-2"])
        run.step({"a": 40})
        run.fork("a", "b", 2 * BLOCK_SIZE)
        run.step({"b": 9, "a": 1})
        run.step({"a": 1, "b": 1})

    def test_positions_after_a_rollback_are_overwritten(self) -> None:
        run = self.start(SPECS["gqa-2"])
        run.step({"a": 20, "b": 3})
        run.step({"a": 5, "b": 4})
        run.truncate("a", 21)
        run.truncate("b", 3)
        run.step({"b": 1, "a": 2})
        run.step({"a": 1, "b": 5})

    @pytest.mark.parametrize("name", ["gqa-2", "narrow-values", "bfloat16"])
    def test_reused_blocks_show_nothing_of_their_former_owner(self, name: str) -> None:
        run = self.start(SPECS[name], num_blocks=8)
        run.step({"a": 50, "b": 40})
        run.free("a")
        run.step({"c": 3, "b": 1})
        run.step({"c": 1, "b": 1})
        run.step({"c": 30})

    @pytest.mark.parametrize(
        "name", ["gqa-2", "mqa", "narrow-values", "bfloat16", "head-80", "float32-on-int8"]
    )
    def test_copied_slots_carry_keys_and_values(self, name: str) -> None:
        run = self.start(SPECS[name])
        run.step({"a": 40, "b": 20})
        run.copy_tokens("a", [3, 17, 39, 8], [20, 0, 16, 31])
        run.step({"a": 1, "b": 1})

    def test_overlapping_copies_read_before_they_write(self) -> None:
        run = self.start(SPECS["gqa-2"])
        run.step({"a": 40})
        run.copy_tokens("a", [10, 11, 12, 13], [11, 12, 13, 10])
        run.copy_tokens("a", list(range(15, 30)), list(range(16, 31)))
        run.copy_tokens("a", [5, 5], [6, 7])
        run.step({"a": 1})

    def test_copies_reach_every_layer_that_is_given(self) -> None:
        run, other = self.start(SPECS["gqa-2"], seed=1), self.start(SPECS["gqa-2"], seed=1)
        for each in (run, other):
            each.step({"a": 20})
        source = torch.tensor([run.requests["a"].blocks[0] * BLOCK_SIZE], device=self.device)
        run.backend.copy_slots([run.cache, other.cache], source, source + 1)
        for each in (run, other):
            history = each.requests["a"]
            history.k_LKH[1], history.v_LKV[1] = history.k_LKH[0], history.v_LKV[0]
            each.step({"a": 1})

    @pytest.mark.parametrize("rotary_dim", [64, 32])
    def test_backends_that_rotate_give_rotated_attention(self, rotary_dim: int) -> None:
        if not self.backend().capabilities.fused_rope:
            pytest.skip("the backend leaves rotation to the layer")
        run = self.start(SPECS["gqa-2"], rotary_dim=rotary_dim)
        run.step({"a": 20, "b": 33})
        run.step({"b": 1, "a": 5})
        run.step({"a": 1, "b": 1})

    @pytest.mark.parametrize("name", ["gqa-2", "gqa-3", "window-5", "sinks", "bfloat16"])
    def test_padding_is_written_nowhere_and_gives_finite_rows(self, name: str) -> None:
        run = self.start_padded(SPECS[name])
        run.step({"a": 20, "b": 1, "c": 7}, Padding(query_lens=(3, 0, 30), num_tokens=5))
        run.step({"a": 1, "b": 1, "c": 1}, Padding(query_lens=(1,)))
        run.step({"c": 1}, Padding(query_lens=(1, 1, 1)))
        run.step({"b": 4, "c": 4}, Padding(query_lens=(4, 0), num_tokens=8))
        run.step({"a": 1, "c": 1}, Padding(query_lens=(0, 0), num_tokens=2))

    def test_a_batch_may_be_all_padding(self) -> None:
        run = self.start_padded(SPECS["gqa-2"])
        run.step({"a": 20})
        for query_lens, num_tokens in (((1, 1, 1), 0), ((17, 0, 3), 4), ((0, 0), 2)):
            run.step({}, Padding(query_lens, num_tokens))
        run.step({"a": 1})

    def test_fewer_queries_than_tokens(self, spec: AttentionSpec) -> None:
        run = self.start_with_fewer_queries(spec)
        prompts = {"a": 45, "none": 20, "b": 3, "all": 16, "one": 1}
        run.step(prompts, num_queries={"a": 1, "b": 2, "all": 16, "one": 1})
        run.step(dict.fromkeys(prompts, 1))
        run.step({"none": 7, "b": 30, "a": 5}, num_queries={"b": 4, "a": 1})
        run.step(dict.fromkeys(prompts, 2))

    @pytest.mark.parametrize("name", ["gqa-2", "window-5", "bfloat16"])
    def test_no_queries_at_all_still_write_keys_and_values(self, name: str) -> None:
        run = self.start_with_fewer_queries(SPECS[name])
        run.step({"a": 20, "b": 7}, num_queries={})
        run.step({"a": 1, "b": 9}, num_queries={})
        run.step({"b": 1, "a": 3})

    def test_fewer_queries_of_a_long_context(self) -> None:
        length = self.long_context
        num_blocks = 2 * length // BLOCK_SIZE + 4
        run = self.start_with_fewer_queries(SPECS["bfloat16"], num_blocks=num_blocks)
        run.step({"long": length - 40, "short": 3}, num_queries={"long": 1})
        run.step({"short": 1, "long": 38}, num_queries={"short": 1, "long": 3})
        run.step({"long": 1, "short": 1})

    @pytest.mark.parametrize("rotary_dim", [64, 32])
    def test_fewer_queries_are_rotated_by_their_own_positions(self, rotary_dim: int) -> None:
        if not self.backend().capabilities.fused_rope:
            pytest.skip("the backend leaves rotation to the layer")
        run = self.start_with_fewer_queries(SPECS["gqa-2"], rotary_dim=rotary_dim)
        run.step({"a": 20, "b": 33}, num_queries={"a": 1, "b": 2})
        run.step({"b": 9, "a": 5}, num_queries={"a": 3})
        run.step({"a": 1, "b": 1})

    def test_layout_accounts_for_its_bytes(self, spec: AttentionSpec) -> None:
        backend = self.backend()
        if reasons := backend.supports(spec):
            pytest.skip("; ".join(reasons))
        layout = backend.layout(spec)
        num_bytes = 0
        for tensor in layout.tensors:
            num_bytes += torch.empty(
                tensor.block_shape, dtype=getattr(torch, tensor.dtype), device="meta"
            ).nbytes
        assert layout.bytes_per_block == num_bytes
        assert len({tensor.name for tensor in layout.tensors}) == len(layout.tensors)

    def test_what_the_capabilities_leave_out_is_refused_with_a_reason(self) -> None:
        backend = self.backend()
        for spec in (make_spec(dtype="float8_e5m2"), make_spec(kv_dtype="complex64")):
            reasons = backend.supports(spec)
            assert reasons
            assert all(isinstance(reason, str) and reason for reason in reasons)
