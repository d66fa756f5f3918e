"""Sizing of the KV pool, and the memory it may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotshoe.errors import KVCacheError
from hotshoe.kv_cache import KVBudget, available_memory_bytes, num_blocks_for_budget
from hotshoe.kv_cache.sizing import MemoryUse, num_blocks_for_gpu

MIB = 1024**2


def budget(**changes: object) -> KVBudget:
    values: dict[str, object] = {
        "bytes_per_block": MIB,
        "memory_bytes": None,
        "fraction": 0.5,
        "free_bytes": 100 * MIB,
        "num_blocks": None,
        "max_model_len": 256,
        "block_size": 16,
    }
    return num_blocks_for_budget(**(values | changes))  # type: ignore[arg-type]


def test_a_share_of_the_free_memory_is_used_by_default() -> None:
    assert budget() == KVBudget(
        num_blocks=50, num_bytes=50 * MIB, num_tokens=800, num_full_length_requests=50 / 16
    )


def test_memory_is_rounded_down_to_whole_blocks() -> None:
    assert budget(memory_bytes=20 * MIB + 5).num_blocks == 20


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert budget(num_blocks=17).num_blocks == 17


def test_a_request_needs_blocks_in_every_cache_group() -> None:
    sized = budget(num_blocks=40, num_groups=2)
    assert (sized.num_tokens, sized.num_full_length_requests) == (320, 1.25)


def test_a_pool_for_exactly_one_full_length_request_is_allowed() -> None:
    assert budget(num_blocks=16).num_full_length_requests == 1


@pytest.mark.parametrize(
    "changes", [{"num_blocks": 15}, {"memory_bytes": 15 * MIB}, {"free_bytes": -MIB}]
)
def test_a_pool_below_one_full_length_request_is_refused_with_the_remedy(
    changes: dict[str, object],
) -> None:
    with pytest.raises(KVCacheError, match="which needs 16 blocks") as caught:
        budget(**changes)
    for knob in ("cache.memory_gb", "cache.num_blocks", "model.max_model_len"):
        assert knob in str(caught.value)


def test_a_pool_beyond_the_free_memory_is_refused() -> None:
    with pytest.raises(KVCacheError, match=r"only 0\.10 GiB of memory are available"):
        budget(num_blocks=101)


def test_two_ways_of_sizing_at_once_are_refused() -> None:
    with pytest.raises(KVCacheError, match="set one of them"):
        budget(num_blocks=20, memory_bytes=20 * MIB)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file tree as the kernel shows it: 1000 MiB available, and what ``files`` says."""
    defaults = {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {1000 * 1024} kB\n"}
    for name, text in (defaults | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > MIB


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory_bytes(machine(tmp_path, {})) == 1000 * MIB


def test_a_control_group_without_limit_changes_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": f"{300 * MIB}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    assert available_memory_bytes(machine(tmp_path, files)) == 1000 * MIB


def test_the_tightest_group_around_the_process_decides_and_its_file_cache_is_free(
    tmp_path: Path,
) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": f"{500 * MIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{450 * MIB}\n",
        "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {150 * MIB}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "1\n",
        "sys/fs/cgroup/outer/inner/memory.stat": "inactive_file 0\n",
    }
    assert available_memory_bytes(machine(tmp_path, files)) == 200 * MIB


def test_a_container_sees_its_own_limit_at_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/not/visible/here\n",
        "sys/fs/cgroup/memory.max": f"{400 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    assert available_memory_bytes(machine(tmp_path, files)) == 300 * MIB


def test_version_1_control_groups_are_respected(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/a\n2:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{400 * MIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{500 * MIB}\n",
        "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 0\n",
    }
    assert available_memory_bytes(machine(tmp_path, files)) == 0


def test_a_system_that_does_not_say_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(KVCacheError, match=r"set cache\.memory_gb"):
        available_memory_bytes(tmp_path)
    with pytest.raises(KVCacheError, match="doesn't say MemAvailable"):
        available_memory_bytes(machine(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"}))


def gpu_budget(**changes: object) -> KVBudget:
    values: dict[str, object] = {
        "bytes_per_block": MIB,
        "use": MemoryUse(total_bytes=1000 * MIB, used_bytes=700 * MIB),
        "utilization": 0.9,
        "memory_bytes": None,
        "num_blocks": None,
        "max_model_len": 256,
        "block_size": 16,
    }
    return num_blocks_for_gpu(**(values | changes))  # type: ignore[arg-type]


def test_a_gpu_gives_what_the_largest_step_leaves_of_the_share() -> None:
    assert gpu_budget().num_blocks == 200


def test_sizes_that_are_given_count_more_than_the_share_of_a_gpu() -> None:
    assert gpu_budget(num_blocks=290).num_blocks == 290
    assert gpu_budget(memory_bytes=250 * MIB).num_blocks == 250


def test_more_than_a_gpu_has_left_is_refused() -> None:
    with pytest.raises(KVCacheError, match=r"301 blocks .* lower cache\.memory_gb"):
        gpu_budget(num_blocks=301)


def test_too_small_a_share_of_a_gpu_says_how_much_is_enough() -> None:
    with pytest.raises(KVCacheError) as caught:
        gpu_budget(utilization=0.7)
    message = str(caught.value)
    assert message.startswith("cache.gpu_memory_utilization 0.7 leaves 0.00 GiB for the KV cache")
    assert "raise cache.gpu_memory_utilization to 0.72 or more" in message
    assert gpu_budget(utilization=0.72).num_blocks == 20


def test_a_gpu_that_is_too_small_says_which_settings_take_less() -> None:
    with pytest.raises(KVCacheError) as caught:
        gpu_budget(use=MemoryUse(total_bytes=1000 * MIB, used_bytes=990 * MIB))
    message = str(caught.value)
    assert "raise cache.gpu_memory_utilization" not in message
    assert "lower model.max_model_len, scheduler.max_num_batched_tokens or" in message
