"""Content hashes: equal only for what may share a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotshoe.kv_cache.prefix import DIGEST_SIZE, PrefixHasher, block_hash, root_hash

names = st.none() | st.text(max_size=3)
tokens = st.lists(st.integers(min_value=-1, max_value=2**40), max_size=6)


@given(st.tuples(names, names), st.tuples(names, names))
def test_roots_are_equal_only_for_equal_salt_and_adapter(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    one = root_hash(salt=first[0], adapter=first[1])
    other = root_hash(salt=second[0], adapter=second[1])
    assert (one == other) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"salt": "a"}, {"adapter": "a"}),
        ({"salt": ""}, {"salt": None}),
        ({"salt": "ab", "adapter": "c"}, {"salt": "a", "adapter": "bc"}),
    ],
)
def test_salt_and_adapter_are_never_confused(
    first: dict[str, str | None], second: dict[str, str | None]
) -> None:
    assert root_hash(**first) != root_hash(**second)


@given(st.tuples(tokens, st.binary(max_size=9)), st.tuples(tokens, st.binary(max_size=9)))
def test_block_hashes_are_equal_only_for_equal_content(
    first: tuple[list[int], bytes], second: tuple[list[int], bytes]
) -> None:
    root = root_hash()
    assert (block_hash(root, *first) == block_hash(root, *second)) == (first == second)


def test_a_token_and_the_same_bytes_as_extra_differ() -> None:
    root = root_hash()
    assert block_hash(root, [1, 7]) != block_hash(root, [1], (7).to_bytes(8, "little"))


def test_a_block_hash_depends_on_every_block_before_it() -> None:
    first = PrefixHasher([1, 2, 3, 4], 2, root=root_hash()).up_to(2)
    second = PrefixHasher([9, 2, 3, 4], 2, root=root_hash()).up_to(2)
    assert first[1] != second[1]
    assert {len(digest) for digest in first} == {DIGEST_SIZE}


def test_the_salt_separates_every_block_of_the_chain() -> None:
    mine = PrefixHasher([1, 2, 3, 4], 2, root=root_hash(salt="mine")).up_to(2)
    yours = PrefixHasher([1, 2, 3, 4], 2, root=root_hash(salt="yours")).up_to(2)
    assert not set(mine) & set(yours)


def test_hashing_a_growing_list_equals_hashing_it_at_once() -> None:
    growing: list[int] = [5, 6]
    hasher = PrefixHasher(growing, 2, root=root_hash())
    hasher.up_to(1)
    growing.extend([7, 8, 9])
    assert hasher.up_to(2) == PrefixHasher([5, 6, 7, 8], 2, root=root_hash()).up_to(2)


def test_the_next_token_joins_the_hash_when_the_content_depends_on_it() -> None:
    first = PrefixHasher([1, 2, 3], 2, root=root_hash(), reads_next_token=True).up_to(1)
    second = PrefixHasher([1, 2, 4], 2, root=root_hash(), reads_next_token=True).up_to(1)
    assert first != second


def test_hashes_are_the_same_in_every_process() -> None:
    digest = block_hash(root_hash(salt="tenant"), [1, 2, 3, 4])
    assert digest.hex().startswith("3988d38b09fc6d0c")
