"""The prefix tree: full blocks found again by the exact tokens up to their end.

A block's digest covers its parent's digest and its own tokens, so equal digests mean equal prefixes from position 0, and the tree
needs no node objects: it is a map from digest to block. The placeholder tokens of all images are the same, so a block's digest also
covers the contents of each image in it and where that image begins. The root digest covers what else decides the contents of a
cache (the adapter). BLAKE2b, 256 bits: a collision would show one request's context to another.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from hashlib import blake2b

from ep_runtime.scheduler.blocks import BlockPool
from ep_runtime.scheduler.core import SchedulerError, Sequence, SequenceImage

DIGEST_BYTES = 32


def root_digest(adapter: int) -> bytes:
    """The digest of the empty prefix under this adapter."""
    return blake2b(adapter.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"prefix root").digest()


def block_digest(parent: bytes, tokens: list[int], images: Iterable[tuple[bytes, int]] = ()) -> bytes:
    """The digest of a full block after `parent`.

    `images` are those in it, wholly or in part: contents' digest, and start relative to the block's, negative for one that began
    before. Blocks of one tree have equally many tokens, and digests of contents equally many bytes, so no two blocks are spelled
    alike.
    """
    digest = blake2b(parent, digest_size=DIGEST_BYTES)
    digest.update(array("i", tokens).tobytes())
    for contents, start in images:
        digest.update(contents + struct.pack("<q", start))
    return digest.digest()


def images_within(images: tuple[SequenceImage, ...], begin: int, end: int) -> list[tuple[bytes, int]]:
    """What `block_digest` covers of the images at positions `begin .. end - 1`."""
    found = []
    for index in range(bisect_right(images, begin, key=lambda image: image.stop), len(images)):
        image = images[index]
        if image.start >= end:
            break
        found.append((image.digest, image.start - begin))
    return found


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
            images = images_within(seq.images, begin, begin + size) if seq.images else ()
            digests.append(block_digest(digests[-1], seq.tokens[begin : begin + size], images))
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
