"""The prefix tree: full blocks found again by the exact tokens up to their end.

A block's digest covers its parent's digest and its own tokens, so equal digests mean equal prefixes from position 0, and the tree
needs no node objects: it is a map from digest to block. The root digest covers what else decides the contents of a cache (the
adapter). BLAKE2b, 256 bits: a collision would show one request's context to another.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from ep_runtime.scheduler.blocks import BlockPool
from ep_runtime.scheduler.core import SchedulerError, Sequence

DIGEST_BYTES = 32


def root_digest(adapter: int) -> bytes:
    """The digest of the empty prefix under this adapter."""
    return blake2b(adapter.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"prefix root").digest()


def block_digest(parent: bytes, tokens: list[int]) -> bytes:
    """The digest of a full block after `parent`."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixTree:
    """Digest -> block, for blocks whose every position was computed by a step with read results."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def digest(self, seq: Sequence, index: int) -> bytes:
        """The digest of the sequence's block `index`; all its tokens are known. Each is computed once a sequence."""
        digests, size = seq.digests, self._block_size
        if not digests:
            digests.append(root_digest(seq.adapter))
        while len(digests) <= index + 1:
            begin = (len(digests) - 1) * size
            digests.append(block_digest(digests[-1], seq.tokens[begin : begin + size]))
        return digests[index + 1]

    def match(self, seq: Sequence, limit: int) -> list[int]:
        """The blocks of the longest known prefix of the sequence's tokens, at most `limit`."""
        found: list[int] = []
        for index in range(limit):
            block = self._blocks.get(self.digest(seq, index))
            if block is None:
                break
            found.append(block)
        return found

    def enter(self, digest: bytes, block: int, pool: BlockPool) -> None:
        """The block's contents are committed. The first block of a content stays the known one."""
        if digest not in self._blocks:
            self._blocks[digest] = block
            self._digests[block] = digest
            pool.mark_cached(block)

    def forget(self, block: int) -> None:
        """The block is evicted."""
        del self._blocks[self._digests.pop(block)]

    def check_integrity(self, pool: BlockPool) -> None:
        """SchedulerError unless both maps agree with each other and with the pool's cached blocks."""
        if {block: digest for digest, block in self._blocks.items()} != self._digests:
            raise SchedulerError("the prefix tree's two maps differ")
        if sorted(self._digests) != pool.cached_blocks():
            raise SchedulerError("the prefix tree's blocks are not the pool's cached blocks")
