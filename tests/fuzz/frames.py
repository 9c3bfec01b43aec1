"""Frames written out by hand from the layout table: well-formed ones, and broken ones behind right checksums."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from msgspec import inspect as mi

from protocol.commands import BATCH, BODIES, Cmd
from tests.fuzz.values import INTEGERS, integer, mutate_bytes, mutate_tree, packed, valid

FORWARDS = (Cmd.PREFILL_CHUNK, Cmd.DECODE, Cmd.MIXED)
NONE, LAST, ALL = 0, 1, 2


@dataclass(slots=True)
class Draft:
    """A frame before it is bytes. `lies` replaces fields of the preamble."""

    version: int
    cmd: int
    seq_id: int
    body: Any
    tokens: list[int]
    epoch: int
    step: int
    flags: int
    lies: dict[str, int]

    def pack(self, rng: random.Random | None = None) -> bytes:
        """Its bytes. With `rng` a body or a checksum may be broken on the way."""
        body = packed(self.body)
        if rng is not None and rng.random() < 0.2:
            body = mutate_bytes(rng, body)
        payload = body + struct.pack(f"<{len(self.tokens)}I", *(token % 2**32 for token in self.tokens))
        fields = {
            "magic": 0x54525045,
            "version": self.version,
            "cmd": self.cmd,
            "epoch": self.epoch,
            "step": self.step,
            "seq_id": self.seq_id,
            "n_tokens": len(self.tokens),
            "body_len": len(body),
            "checksum": crc32(payload),
            "flags": self.flags,
        } | self.lies
        if self.version == 1:
            del fields["seq_id"]
        sizes = {"version": 2, "cmd": 2, "step": 8}
        head = b"".join(
            (value % 256**size).to_bytes(size, "little") for name, value in fields.items() for size in [sizes.get(name, 4)]
        )
        return head + struct.pack("<I", crc32(head)) + payload


def _span(rng: random.Random, slot: int, cmd: int) -> tuple[list[Any], int]:
    """One span of the array form, and how many tokens it needs."""
    length = 1 if cmd == Cmd.DECODE else rng.choice([1, 1, 2, 3, 8])
    fed = cmd != Cmd.PREFILL_CHUNK and rng.random() < 0.5
    wanted: Any = rng.choice([NONE, LAST, ALL, sorted(rng.sample(range(length), rng.randrange(length + 1)))])
    last = wanted in (LAST, ALL) or (isinstance(wanted, list) and wanted[-1:] == [length - 1])
    blocks = [integer(rng, 0, 2**31 - 1) for _ in range(rng.choice([0, 0, 1, 3]))]
    depth = rng.choice([0, 0, 0, 1, 2, 3, 16])
    return [slot, integer(rng, 0, 2**31 - 1), length, fed, last and rng.random() < 0.7, wanted, blocks, depth], length - fed


def draft(rng: random.Random, version: int) -> Draft:
    """A well-formed frame of any command in use."""
    cmd = rng.choice([cmd for cmd in BODIES if version == 2 or cmd != Cmd.COPY])
    body = BODIES[cmd]
    tokens: list[int] = []
    seq_id = integer(rng, 0, 2**24 - 1) if body.per_slot else BATCH
    if cmd in FORWARDS:
        slots = [0] if version == 1 else rng.sample(range(40), rng.choice([1, 1, 2, 5]))
        pairs = [_span(rng, slot, cmd) for slot in slots]
        tree: Any = {"spans": [span for span, _ in pairs]}
        tokens = [integer(rng, 0, 2**31 - 1) for _ in range(sum(due for _, due in pairs))]
        if len(slots) == 1 and version == 2 and rng.random() < 0.3:
            seq_id = slots[0]
    else:
        tree = valid(rng, mi.type_info(body))
    flags = rng.randrange(2) if cmd in FORWARDS else 0
    epoch, step = integer(rng, 0, 2**32 - 1), integer(rng, 0, 2**64 - 1)
    return Draft(version, cmd, seq_id, tree, tokens, epoch, step, flags, {})


def broken(rng: random.Random, made: Draft) -> Draft:
    """`made`, changed where no checksum notices."""
    kind = rng.randrange(5)
    if kind <= 1:
        made.body = mutate_tree(rng, made.body)
    elif kind == 2:
        name = rng.choice(["magic", "version", "cmd", "epoch", "step", "seq_id", "n_tokens", "body_len", "checksum", "flags"])
        made.lies[name] = rng.choice([*INTEGERS, *range(25)])
    elif kind == 3 and made.tokens:
        made.tokens[rng.randrange(len(made.tokens))] = rng.choice(INTEGERS)
    else:
        made.tokens = [*made.tokens, 1] if rng.random() < 0.5 else made.tokens[:-1]
    return made


def frame_bytes(rng: random.Random, version: int) -> bytes:
    """A frame: well-formed in half of the cases, else broken behind its checksums, or in them."""
    made = draft(rng, version)
    if rng.random() < 0.5:
        return made.pack()
    if rng.random() < 0.7:
        return broken(rng, made).pack(rng)
    return mutate_bytes(rng, made.pack())
