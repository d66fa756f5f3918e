"""How many KV blocks a memory budget buys, and how much memory there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hotshoe.errors import KVCacheError

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The size of a KV pool.

    Attributes:
        num_bytes: memory of all pages.
        num_tokens: tokens that fit, over all requests.
        num_full_length_requests: requests of ``max_model_len`` tokens that fit side by side.
    """

    num_blocks: int
    num_bytes: int
    num_tokens: int
    num_full_length_requests: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a GPU, and how much of it is used by all programs together."""

    total_bytes: int
    used_bytes: int


def num_blocks_for_gpu(
    *,
    bytes_per_block: int,
    use: MemoryUse,
    utilization: float,
    memory_bytes: int | None,
    num_blocks: int | None,
    max_model_len: int,
    block_size: int,
) -> KVBudget:
    """Size the pool of a GPU.

    Args:
        use: while the largest step runs, without the pool.
        utilization: share of the whole memory that may be used
            (``cache.gpu_memory_utilization``), if neither of the other two sizes is given.
        memory_bytes: as in ``num_blocks_for_budget``, likewise the others.

    Raises:
        KVCacheError: if the pool can't hold one request of ``max_model_len`` tokens, or there isn't
            enough memory.
    """
    if num_blocks is None and memory_bytes is None:
        memory_bytes = int(use.total_bytes * utilization) - use.used_bytes
        num_needed_bytes = -(-max_model_len // block_size) * bytes_per_block
        if memory_bytes < num_needed_bytes:
            raise KVCacheError(
                _too_little(use, utilization, memory_bytes, num_needed_bytes, max_model_len)
            )
    return num_blocks_for_budget(
        bytes_per_block=bytes_per_block,
        memory_bytes=memory_bytes,
        fraction=1.0,
        free_bytes=use.total_bytes - use.used_bytes,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
    )


def num_blocks_for_budget(
    *,
    bytes_per_block: int,
    memory_bytes: int | None,
    fraction: float,
    free_bytes: int,
    num_blocks: int | None,
    max_model_len: int,
    block_size: int,
    num_groups: int = 1,
) -> KVBudget:
    """Size the pool by a number of blocks, by an amount of memory, or by a share of what is free.

    Args:
        bytes_per_block: over all layers of a cache group.
        memory_bytes: budget (``cache.memory_gb``); None = not given.
        fraction: share of ``free_bytes`` to use when neither of the other two is given.
        free_bytes: memory left for KV, weights already subtracted.
        num_blocks: exact size (``cache.num_blocks``); None = not given.
        num_groups: cache groups; a request holds blocks in each.

    Raises:
        KVCacheError: if the pool can't hold one request of ``max_model_len`` tokens, exceeds
            ``free_bytes``, or both ways of sizing it were given.
    """
    if num_blocks is not None and memory_bytes is not None:
        raise KVCacheError(
            f"cache.num_blocks ({num_blocks!r}) and cache.memory_gb "
            f"({memory_bytes / _GIB:.2f}) both size the KV cache; set one of them"
        )
    if num_blocks is None:
        budget = int(free_bytes * fraction) if memory_bytes is None else memory_bytes
        num_blocks = max(0, budget) // bytes_per_block
    num_needed = -(-max_model_len // block_size) * num_groups
    if num_blocks < num_needed:
        raise KVCacheError(_too_small(num_blocks, num_needed, bytes_per_block, max_model_len))
    num_bytes = num_blocks * bytes_per_block
    if num_bytes > free_bytes:
        raise KVCacheError(
            f"a KV cache of {num_blocks} blocks takes {num_bytes / _GIB:.2f} GiB but only "
            f"{free_bytes / _GIB:.2f} GiB of memory are available; lower cache.memory_gb or "
            "cache.num_blocks"
        )
    return KVBudget(
        num_blocks=num_blocks,
        num_bytes=num_bytes,
        num_tokens=num_blocks // num_groups * block_size,
        num_full_length_requests=num_blocks / num_needed,
    )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still use: what the machine has left, or less where a control
    group limits it.

    Memory of a control group that only caches files counts as available.

    Args:
        root: where ``proc`` and ``sys`` are mounted.

    Raises:
        KVCacheError: if the system doesn't say.
    """
    available = _machine_available(root / "proc/meminfo")
    for headroom in _cgroup_headrooms(root):
        available = min(available, headroom)
    return max(0, available)


def _too_small(num_blocks: int, num_needed: int, bytes_per_block: int, max_model_len: int) -> str:
    return (
        f"a KV cache of {num_blocks} blocks ({num_blocks * bytes_per_block / _GIB:.3f} GiB) can't "
        f"hold one request of model.max_model_len {max_model_len!r} tokens, which needs "
        f"{num_needed} blocks ({num_needed * bytes_per_block / _GIB:.3f} GiB); raise "
        "cache.memory_gb or cache.num_blocks, or lower model.max_model_len"
    )


def _too_little(
    use: MemoryUse, utilization: float, left: int, num_needed_bytes: int, max_model_len: int
) -> str:
    share = math.ceil((use.used_bytes + num_needed_bytes) / use.total_bytes * 100) / 100
    remedy = "lower model.max_model_len, scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    if share <= 1:
        remedy = f"raise cache.gpu_memory_utilization to {share!r} or more, or {remedy}"
    return (
        f"cache.gpu_memory_utilization {utilization!r} leaves {max(left, 0) / _GIB:.2f} GiB for "
        f"the KV cache: weights, the largest step and other programs take "
        f"{use.used_bytes / _GIB:.2f} of the GPU's {use.total_bytes / _GIB:.2f} GiB; one request "
        f"of model.max_model_len {max_model_len!r} tokens needs {num_needed_bytes / _GIB:.2f} GiB; "
        f"{remedy}"
    )


def _machine_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError as error:
        raise KVCacheError(
            f"can't read the available memory from {meminfo}: {error}; set cache.memory_gb"
        ) from error
    raise KVCacheError(f"{meminfo} doesn't say MemAvailable; set cache.memory_gb")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Bytes left in each limited control group around this process, version 2 and version 1."""
    for mount, path in _cgroup_mounts(root):
        is_v1 = mount.name == "memory"
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if is_v1
            else ("memory.max", "memory.current", "inactive_file")
        )
        # inside a container the path may not be visible, while the mount is the group itself
        for group in (path, *path.parents):
            headroom = _headroom(mount / group.relative_to("/"), *names)
            if headroom is not None:
                yield headroom


def _cgroup_mounts(root: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # a system without control groups limits nothing
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = PurePosixPath("/") / path.removeprefix("/").replace("../", "")
        if hierarchy == "0" and not controllers:
            yield root / "sys/fs/cgroup", group
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory", group


def _headroom(group: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((group / usage_name).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:
                used -= int(value)
        return int(limit) - used
    except OSError:  # no limit file: the root group, or one outside of this container
        return None
