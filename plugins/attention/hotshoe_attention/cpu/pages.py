"""How the pages of a layer look to Python; ``attention.h`` says the same to C++."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotshoe.api import KVCacheSpec, KVLayout, KVTensor
from hotshoe_native.attention import LANES

_NAME = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """One layer's pages: per block and KV head, keys as ``[words of head_dim][block_size]``, then
    values as ``[words of block_size][head_dim_v]``; a word is one float32, two bfloat16 or four
    int8. Keys of int8 have two more words, float32 scales: the key's and the value's.
    """

    head_dim: int
    head_dim_v: int
    block_size: int
    dtype: str

    @staticmethod
    def of(kv: KVCacheSpec, block_size: int) -> Pages:
        """Of layers that keep this."""
        return Pages(
            head_dim=kv.head_dim, head_dim_v=kv.head_dim_v, block_size=block_size, dtype=kv.dtype
        )

    @staticmethod
    def named(name: str, tensor: Tensor, block_size: int) -> Pages:
        """Of a cache's only tensor: its name tells what its shape doesn't."""
        head_dim, head_dim_v = map(int, name.removeprefix(f"{_NAME}_").split("_"))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Pages(head_dim=head_dim, head_dim_v=head_dim_v, block_size=block_size, dtype=dtype)

    @property
    def name(self) -> str:
        """Of the tensor."""
        return f"{_NAME}_{self.head_dim}_{self.head_dim_v}"

    def layout(self, num_kv_heads: int) -> KVLayout:
        """As the core wants to know it."""
        size = self._key_elements + self.block_size * self._columns
        itemsize: int = getattr(torch, self.dtype).itemsize
        return KVLayout(
            tensors=(KVTensor(name=self.name, block_shape=(num_kv_heads, size), dtype=self.dtype),),
            bytes_per_block=num_kv_heads * size * itemsize,
        )

    def copy_slots(self, tensor: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy tokens, all read before any is written."""
        per_word = self.per_word
        heads = tensor.shape[:2]
        keys = tensor[..., : self._key_elements].view(*heads, -1, self.block_size, per_word)
        values = tensor[..., self._key_elements :].view(*heads, -1, self._columns, per_word)
        from_block, from_offset = _split(source, self.block_size)
        to_block, to_offset = _split(target, self.block_size)
        # indexing by tensors makes a copy, so a slot may be both source and target
        keys[to_block, :, :, to_offset] = keys[from_block, :, :, from_offset]
        from_word, from_place = _split(from_offset, per_word)
        to_word, to_place = _split(to_offset, per_word)
        values[to_block, :, to_word, :, to_place] = values[from_block, :, from_word, :, from_place]

    @property
    def per_word(self) -> int:
        """Elements of a word; tokens, where it is one of values."""
        return 4 // int(getattr(torch, self.dtype).itemsize)

    @property
    def _key_elements(self) -> int:
        num_scales = 2 if self.dtype == "int8" else 0
        num_words = num_scales + -(-self.head_dim // self.per_word)
        return num_words * self.per_word * self.block_size

    @property
    def _columns(self) -> int:
        return self.head_dim_v + -self.head_dim_v % LANES


def _split(slots: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return slots // size, slots % size
