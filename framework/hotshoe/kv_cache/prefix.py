"""Content hashes of KV blocks: a block's hash stands for its own tokens and for all before them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

DIGEST_SIZE = 32  # bytes; a collision would serve one client the context of another


def root_hash(*, salt: str | None = None, adapter: str | None = None) -> bytes:
    """Parent of a request's first block: the domain within which blocks may be shared.

    Hashes are chained, so what is in the root separates every later block too: requests with
    different salts (tenants) or adapters never share a block, and no block repeats them.
    """
    hasher = blake2b(digest_size=DIGEST_SIZE, person=b"hotshoe kv root")
    for part in (salt, adapter):
        if part is None:
            hasher.update(b"\x00")
        else:
            encoded = part.encode("utf-8", "surrogatepass")
            hasher.update(b"\x01" + pack("<Q", len(encoded)) + encoded)
    return hasher.digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of one block, 32 bytes.

    The parent's length is fixed, the tokens are counted and 8 bytes each, and ``extra`` comes last:
    two different inputs never encode alike.

    Args:
        parent: hash of the block before, or ``root_hash`` for the first.
        token_ids: what decides the block's content beyond its parent.
        extra: anything else that does, such as a digest of an image inside it.
    """
    num_tokens = len(token_ids)
    encoded = pack(f"<I{num_tokens}q", num_tokens, *token_ids)
    return blake2b(
        b"".join((parent, encoded, extra)), digest_size=DIGEST_SIZE, person=b"hotshoe kv block"
    ).digest()


class PrefixHasher:
    """Hashes of the full blocks of one growing token list, each computed once, when first needed.

    Args:
        token_ids: prompt and output; may grow, must never change otherwise.
        block_size: tokens per block.
        root: ``root_hash`` of the request's salt and adapter.
        reads_next_token: the content of a block also depends on the token that follows it, which
            therefore joins its hash; such a block has a hash once that token is known.
    """

    __slots__ = ("_block_size", "_num_hashed_tokens", "_parent", "hashes", "token_ids")

    def __init__(
        self,
        token_ids: Sequence[int],
        block_size: int,
        *,
        root: bytes,
        reads_next_token: bool = False,
    ) -> None:
        self.token_ids = token_ids
        self.hashes: list[bytes] = []
        self._parent = root
        self._block_size = block_size
        self._num_hashed_tokens = block_size + reads_next_token

    def append_next(self) -> bytes:
        """Hash one more block, which must have all its tokens, and return its hash."""
        start = len(self.hashes) * self._block_size
        token_ids = self.token_ids[start : start + self._num_hashed_tokens]
        assert len(token_ids) == self._num_hashed_tokens, "hashed a block that is not full"
        self._parent = block_hash(self._parent, token_ids)
        self.hashes.append(self._parent)
        return self._parent

    def up_to(self, num_blocks: int) -> list[bytes]:
        """The hashes so far, at least the first ``num_blocks`` of them; not to be modified."""
        while len(self.hashes) < num_blocks:
            self.append_next()
        return self.hashes
