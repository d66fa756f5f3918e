"""``naive``: one head of one query at a time over keys gathered slot by slot; it counts."""

from __future__ import annotations

from typing import Any

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayerView,
    AttentionSpec,
    Component,
    KVLayout,
    KVTensor,
    LayerCache,
    PluginOptions,
    hookimpl,
)

CAPABILITIES = AttentionCapabilities(dtypes=("float32",), kv_dtypes=("float32",))
BUILT: list[NaiveAttention] = []


class NaiveAttention(AttentionBackend):
    """Pages of ``[block_size, key or value, num_kv_heads, head_dim]``."""

    capabilities = CAPABILITIES

    def __init__(self, context: AttentionContext) -> None:
        self._block_size = context.block_size
        self.num_calls = self.num_steps = 0

    def supports(self, spec: AttentionSpec) -> list[str]:
        wanted = {
            "keys and values of different sizes": spec.kv.head_dim != spec.kv.head_dim_v,
            "sliding windows": spec.kv.sliding_window is not None,
            "soft caps": spec.softcap is not None,
            "sinks": spec.has_sinks,
            f"dtype {spec.dtype!r}": spec.dtype != "float32",
            f"pages of {spec.kv.dtype!r}": spec.kv.dtype != "float32",
        }
        return [f"no {what}" for what, is_wanted in wanted.items() if is_wanted]

    def layout(self, spec: AttentionSpec) -> KVLayout:
        shape = (self._block_size, 2, spec.kv.num_kv_heads, spec.kv.head_dim)
        num_bytes = 4 * shape[0] * shape[1] * shape[2] * shape[3]
        return KVLayout(
            tensors=(KVTensor(name="kv", block_shape=shape, dtype="float32"),),
            bytes_per_block=num_bytes,
        )

    def build_metadata(self, batch: AttentionBatch, group: Any) -> AttentionBatch:
        self.num_steps += 1
        return batch

    def forward(
        self,
        layer: AttentionLayerView,
        q: Any,
        k: Any,
        v: Any,
        cache: LayerCache,
        metadata: AttentionBatch,
    ) -> Any:
        import torch

        self.num_calls += 1
        slots = cache["kv"].flatten(0, 1)
        slots[metadata.slot_mapping, 0] = k
        slots[metadata.slot_mapping, 1] = v
        output = torch.empty_like(q)
        group_size = layer.spec.num_heads // layer.spec.kv.num_kv_heads
        start = 0
        for request, query_len in enumerate(metadata.query_lens_list):
            seq_len = metadata.seq_lens_list[request]
            table = metadata.block_table[request]
            where = [
                int(table[i // self._block_size]) * self._block_size + i % self._block_size
                for i in range(seq_len)
            ]
            keys, values = slots[where, 0], slots[where, 1]
            for query in range(query_len):
                end = seq_len - query_len + query + 1
                for head in range(layer.spec.num_heads):
                    kv_head = head // group_size
                    scores = keys[:end, kv_head] @ q[start + query, head] * layer.spec.scale
                    weights = scores.softmax(0)
                    output[start + query, head] = weights @ values[:end, kv_head]
            start += query_len
        return output

    def copy_slots(self, caches: Any, source: Any, target: Any) -> None:
        for cache in caches:
            slots = cache["kv"].flatten(0, 1)
            slots[target] = slots[source]


def build(options: PluginOptions, context: AttentionContext) -> NaiveAttention:
    BUILT.append(NaiveAttention(context))
    return BUILT[-1]


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="attention/0", factory=build, capabilities=CAPABILITIES)
