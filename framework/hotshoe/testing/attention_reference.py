"""Dense attention over whole histories, written for clarity alone, and a paged run that is checked
against it step by step.
"""

# T=queries of one request L=positions N=num_heads K=num_kv_heads H=head_dim V=head_dim_v

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hotshoe.api import AttentionBackend, AttentionBatch, AttentionSpec, LayerCache
from hotshoe.testing.forward import allocate_cache, make_batch
from hotshoe.worker.batch import with_queries

TOLERANCES = {
    "float32": 2e-5,
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "int8": 4e-2,
}
"""Largest allowed difference to the float64 reference by dtype; values are of unit scale. The
reference rounds keys and values as pages of the dtype do, but not to int8, for which backends
choose scales.
"""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a backend sees of the layer that calls it."""

    spec: AttentionSpec
    sinks: Tensor | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None
    layer_index: int = 0


@dataclass(frozen=True, slots=True)
class Padding:
    """What fills a batch up.

    Attributes:
        query_lens: of requests after those that are real.
        num_tokens: after the last request's.
    """

    query_lens: tuple[int, ...] = ()
    num_tokens: int = 0

    @property
    def num_rows(self) -> int:
        """All tokens that are padding."""
        return sum(self.query_lens) + self.num_tokens


@dataclass(slots=True)
class History:
    """One request: its blocks, and its keys and values so far, as the pages hold them."""

    blocks: list[int]
    k_LKH: Tensor
    v_LKV: Tensor

    @property
    def num_tokens(self) -> int:
        return self.k_LKH.shape[0]


@dataclass(slots=True)
class PagedRun:
    """One attention layer under test: requests grow step by step on shuffled blocks, and each
    step's output is compared with the reference.

    Pages that no request owns hold NaN, and unused entries of the block table point at them.
    """

    backend: AttentionBackend
    layer: LayerFacts
    block_size: int
    num_blocks: int = 64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    tolerance: float = TOLERANCES["float32"]
    cache: LayerCache = field(init=False)
    requests: dict[str, History] = field(init=False, default_factory=dict)
    _generators: dict[str, torch.Generator] = field(init=False, default_factory=dict)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.layer.spec
        self.cache = allocate_cache(self.backend, spec, self.num_blocks, self.device)
        self._free = torch.randperm(
            self.num_blocks, generator=torch.Generator().manual_seed(self.seed)
        ).tolist()
        poison(self.cache, self._free)

    def step(
        self,
        query_lens: Mapping[str, int],
        padding: Padding | None = None,
        *,
        num_queries: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Give each request so many more tokens, in this order of the batch.

        Args:
            query_lens: by request id.
            padding: for backends that take it; its keys and values are NaN.
            num_queries: by request id, how many of its tokens are queries, the last ones; none if
                it isn't in there. For backends that take fewer queries; None = all tokens.

        Returns:
            Outputs by request id, ``[number of its queries, num_heads, head_dim_v]``, already
            checked.

        Raises:
            AssertionError: if an output is wrong, or has another shape, dtype or layout than the
                contract says.
        """
        spec = self.layer.spec
        q = self._random(query_lens, spec.num_heads, spec.kv.head_dim)
        # strided views, as a model has them of a merged projection
        k = self._random(query_lens, spec.kv.num_kv_heads + 1, spec.kv.head_dim)[:, 1:]
        v = self._random(query_lens, spec.kv.num_kv_heads + 1, spec.kv.head_dim_v)[:, :-1]
        expected = self._extend(query_lens, q, k, v)
        batch = self._batch(query_lens)
        if num_queries is not None:
            counts = [num_queries.get(name, 0) for name in query_lens]
            batch = with_queries(batch, counts, lambda one: torch.from_numpy(one).to(self.device))
            by_request = zip(torch.split(q, list(query_lens.values())), counts, strict=True)
            q = torch.cat([_last(rows, count) for rows, count in by_request])
            expected = {
                name: _last(rows, num_queries.get(name, 0)) for name, rows in expected.items()
            }
        num_real = q.shape[0]
        free = {name: pages[self._free].clone() for name, pages in self.cache.items()}
        if padding:
            batch = pad(batch, padding)
            q = _filled(q, padding.num_rows, 1.0)
            k, v = (_filled(one, padding.num_rows, torch.nan) for one in (k, v))
        metadata = self.backend.build_metadata(batch, spec.kv)
        output = self.backend.forward(self.layer, q, k, v, self.cache, metadata)
        assert output.shape == (q.shape[0], spec.num_heads, spec.kv.head_dim_v)
        assert output.dtype == q.dtype
        assert output.is_contiguous()
        assert bool(torch.isfinite(output[num_real:]).all()), "the output of padding isn't finite"
        for name, before in free.items():
            same = torch.equal(_bits(self.cache[name][self._free]), _bits(before))
            assert same, f"{name!r} was written in blocks that no request owns"
        outputs = {}
        for name, reference in expected.items():
            count = reference.shape[0]
            outputs[name], output = output[:count], output[count:]
            self._compare(outputs[name], reference, name)
        return outputs

    def fork(self, parent: str, child: str, num_tokens: int) -> None:
        """Start a request on the first full blocks of another one, as a prefix hit does."""
        assert num_tokens % self.block_size == 0
        source = self.requests[parent]
        self.requests[child] = History(
            source.blocks[: num_tokens // self.block_size],
            source.k_LKH[:num_tokens].clone(),
            source.v_LKV[:num_tokens].clone(),
        )

    def copy_tokens(self, name: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the cache entries at some positions of a request to others."""
        history = self.requests[name]
        self.backend.copy_slots(
            [self.cache], self._slots(history, source), self._slots(history, target)
        )
        for entries in (history.k_LKH, history.v_LKV):
            entries[list(target)] = entries[list(source)].clone()

    def truncate(self, name: str, num_tokens: int) -> None:
        """Forget the last positions, as after refused drafts; their entries stay in the pages."""
        history = self.requests[name]
        history.k_LKH, history.v_LKV = history.k_LKH[:num_tokens], history.v_LKV[:num_tokens]

    def free(self, name: str) -> None:
        """End a request; the next one reuses its blocks, with what lies in them."""
        self._free += self.requests.pop(name).blocks

    @property
    def _history_dtype(self) -> torch.dtype:
        spec = self.layer.spec
        name = spec.dtype if spec.kv.dtype == "int8" else spec.kv.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def _batch(self, query_lens: Mapping[str, int]) -> AttentionBatch:
        # where there is no request, one of padding without tokens stands for it
        return make_batch(
            list(query_lens.values()) or [0],
            [self.requests[name].num_tokens for name in query_lens] or [0],
            [self.requests[name].blocks for name in query_lens] or [self._free[:1]],
            self.block_size,
            device=self.device,
            padding_block=self._free[0],
        )

    def _random(self, query_lens: Mapping[str, int], *shape: int) -> Tensor:
        """Values that depend on the request's name and past alone, not on the batch."""
        rows = [torch.empty(0, *shape)]
        for name, query_len in query_lens.items():
            generator = self._generators.get(name)
            if generator is None:
                generator = self._generators[name] = torch.Generator()
                generator.manual_seed(self.seed + zlib.crc32(name.encode()))
            rows.append(torch.randn(query_len, *shape, generator=generator))
        return torch.cat(rows).to(getattr(torch, self.layer.spec.dtype)).to(self.device)

    def _extend(
        self, query_lens: Mapping[str, int], q: Tensor, k: Tensor, v: Tensor
    ) -> dict[str, Tensor]:
        expected = {}
        start = 0
        kv_dtype = self._history_dtype
        for name, query_len in query_lens.items():
            rows = slice(start, start + query_len)
            history = self.requests.get(name) or self._start(name)
            first = history.num_tokens
            history.k_LKH = torch.cat((history.k_LKH, self._rotate(k[rows], first).to(kv_dtype)))
            history.v_LKV = torch.cat((history.v_LKV, v[rows].to(kv_dtype)))
            while len(history.blocks) * self.block_size < history.num_tokens:
                history.blocks.append(self._free.pop())
            expected[name] = reference_attention(
                self._rotate(q[rows], first), history.k_LKH, history.v_LKV, self.layer
            )
            start += query_len
        return expected

    def _start(self, name: str) -> History:
        kv = self.layer.spec.kv
        dtype = self._history_dtype
        history = self.requests[name] = History(
            [],
            torch.empty(0, kv.num_kv_heads, kv.head_dim, dtype=dtype, device=self.device),
            torch.empty(0, kv.num_kv_heads, kv.head_dim_v, dtype=dtype, device=self.device),
        )
        return history

    def _rotate(self, x: Tensor, first_position: int) -> Tensor:
        """Rotary embedding for backends that rotate themselves."""
        if self.layer.cos_sin is None:
            return x
        positions = slice(first_position, first_position + x.shape[0])
        cos, sin = (table[positions].unsqueeze(1) for table in self.layer.cos_sin)
        half = cos.shape[-1]
        first, second, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
        return rotated.to(x.dtype)

    def _slots(self, history: History, positions: Sequence[int]) -> Tensor:
        size = self.block_size
        slots = [
            history.blocks[position // size] * size + position % size for position in positions
        ]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def _compare(self, output: Tensor, reference: Tensor, name: str) -> None:
        torch.testing.assert_close(
            output.double(),
            reference,
            atol=self.tolerance,
            rtol=0,
            msg=lambda text: f"request {name!r}, {self.layer.spec}: {text}",
        )


def reference_attention(q_TNH: Tensor, k_LKH: Tensor, v_LKV: Tensor, layer: LayerFacts) -> Tensor:
    """Causal attention of a request's last T positions over all L, in float64: ``[T, N, V]``."""
    spec = layer.spec
    num_queries, num_positions = q_TNH.shape[0], k_LKH.shape[0]
    group_size = spec.num_heads // spec.kv.num_kv_heads
    keys = k_LKH.double().repeat_interleave(group_size, 1)
    values = v_LKV.double().repeat_interleave(group_size, 1)
    logits_NTL = torch.einsum("tnh,lnh->ntl", q_TNH.double(), keys) * spec.scale
    if spec.softcap is not None:
        logits_NTL = spec.softcap * torch.tanh(logits_NTL / spec.softcap)
    positions = torch.arange(num_positions, device=q_TNH.device)
    queries = positions[num_positions - num_queries :].unsqueeze(1)
    hidden = positions > queries
    if spec.kv.sliding_window is not None:
        hidden |= positions <= queries - spec.kv.sliding_window
    logits_NTL = logits_NTL.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double().view(-1, 1, 1).expand(-1, num_queries, 1)
        weights = torch.softmax(torch.cat((logits_NTL, sinks), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits_NTL, -1)
    return torch.einsum("ntl,lnv->tnv", weights, values)


def pad(batch: AttentionBatch, padding: Padding) -> AttentionBatch:
    """Fill a batch up, and leave out what a backend that takes padding doesn't read: lengths as
    Python ints, and close bounds.
    """
    last = batch.query_start_loc[-1:]
    ends = torch.tensor(padding.query_lens, dtype=last.dtype, device=last.device).cumsum(0)
    num_reqs = len(padding.query_lens)

    return replace(
        batch,
        query_start_loc=torch.cat((batch.query_start_loc, (last + ends).to(last.dtype))),
        seq_lens=_filled(batch.seq_lens, num_reqs, 0),
        block_table=_filled(batch.block_table, num_reqs, torch.iinfo(torch.int32).max),
        slot_mapping=_filled(batch.slot_mapping, padding.num_rows, -1),
        positions=_filled(batch.positions, padding.num_rows, 0),
        max_query_len=max(batch.max_query_len, *padding.query_lens, 1),
        max_seq_len=batch.max_seq_len + 100,
        query_lens_list=(),
        seq_lens_list=(),
    )


def _filled(values: Tensor, num_rows: int, value: float) -> Tensor:
    return torch.cat((values, values.new_full((num_rows, *values.shape[1:]), value)))


def _last(rows: Tensor, count: int) -> Tensor:
    return rows[rows.shape[0] - count :]


def _bits(values: Tensor) -> Tensor:
    """To compare what may be NaN."""
    return values.view(torch.uint8)


def poison(cache: LayerCache, blocks: Sequence[int]) -> None:
    """Fill blocks with what must never reach an output: NaN, or the largest integer."""
    for pages in cache.values():
        dtype = pages.dtype
        pages[list(blocks)] = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
