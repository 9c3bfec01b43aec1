"""Random wire values: valid ones for any msgspec type, and broken ones by mutation of trees and of bytes."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
from msgspec import inspect as mi

INTEGERS = [0, 1, 2, 3, 7, 15, 16, 17, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**31 - 1, 2**31]
INTEGERS += [2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -32, -33, -128, -129, -(2**31), -(2**63)]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "a", "r-1", "0", "true", "null", "\0", "\n", "é日本😀", "x" * 300, "../../etc/passwd", "{{7*7}}", "%s%n", "<|im_end|>"]
PIECES = [b"\x81\x90\xc0", b"\x81\x80\xc0", b"\x81\x81\xc0\xc0\xc0", b"\xc0\x01", b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xc1"]
PIECES += [
    b"\xd6\xff\xff\xff\xff\xff",
    b"\xd7\xff" + b"\xff" * 8,
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xd4\x05\x00",
    b"\xdd\xff\xff\xff\xff",
]
"""msgpack that decoders have to think about: keys that cannot be hashed, no UTF-8, dates out of range, extensions, long claims."""
FAIR = 6
"""One in so many values is an edge of its type; the rest are small."""


def integer(rng: random.Random, low: int, high: int) -> int:
    """An integer of [low, high]: mostly small, sometimes an edge."""
    if rng.randrange(FAIR):
        return min(high, low + rng.randrange(12)) if low > -12 else rng.randrange(-6, 6)
    fitting = [value for value in [*INTEGERS, low, high] if low <= value <= high]
    return rng.choice(fitting)


def scalar(rng: random.Random) -> Any:
    """Anything that msgpack holds in one piece."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.randbytes(rng.choice([0, 1, 4, 40]))
    return rng.choice(INTEGERS)


def tree(rng: random.Random, depth: int = 3) -> Any:
    """A random nest of lists and maps."""
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return [tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 2:
        return {rng.choice(TEXTS): tree(rng, depth - 1) for _ in range(rng.randrange(4))}
    return scalar(rng)


def valid(rng: random.Random, kind: mi.Type) -> Any:
    """A tree that decodes as `kind`; structs are maps with their tag, or arrays."""
    match kind:
        case mi.Metadata():
            return valid(rng, kind.type)
        case mi.IntType():
            return integer(rng, -(2**63) if kind.ge is None else kind.ge, 2**63 - 1 if kind.le is None else kind.le)
        case mi.FloatType():
            low, high = -math.inf if kind.ge is None else kind.ge, math.inf if kind.le is None else kind.le
            return rng.choice([value for value in FLOATS[:7] if low <= value <= high])
        case mi.BoolType():
            return rng.random() < 0.5
        case mi.StrType():
            return rng.choice(TEXTS)
        case mi.BytesType():
            return rng.randbytes(rng.choice([0, 1, 16, 100]))
        case mi.NoneType():
            return None
        case mi.LiteralType():
            return rng.choice(kind.values)
        case mi.EnumType():
            return rng.choice(list(kind.cls)).value
        case mi.ListType():
            return [valid(rng, kind.item_type) for _ in range((kind.min_length or 0) + rng.choice([0, 1, 1, 2, 3, 9]))]
        case mi.TupleType():
            return [valid(rng, item) for item in kind.item_types]
        case mi.DictType():
            return {valid(rng, kind.key_type): valid(rng, kind.value_type) for _ in range(rng.randrange(4))}
        case mi.UnionType():
            return valid(rng, rng.choice(kind.types))
        case mi.StructType():
            return _struct(rng, kind)
    raise TypeError(f"no values for {kind}")


def _struct(rng: random.Random, kind: mi.StructType) -> Any:
    if kind.array_like:
        fields = [valid(rng, field.type) for field in kind.fields]
        return fields if kind.tag is None else [kind.tag, *fields]
    found = {} if kind.tag is None else {kind.tag_field: kind.tag}
    for field in kind.fields:
        if field.required or rng.random() < 0.5:
            found[field.encode_name] = valid(rng, field.type)
    return found


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) below `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        found.append((node, key))
        _places(value, found)
    return found


def mutate_tree(rng: random.Random, root: Any) -> Any:
    """`root`, changed in place in one spot, or what takes its place."""
    places = _places(root, [])
    if not places:
        return tree(rng)
    holder, key = rng.choice(places)
    value = holder[key]
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = scalar(rng)
    elif kind == 2:
        holder[key] = tree(rng)
    elif kind == 3 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = tree(rng, 1)
    elif kind == 4 and isinstance(holder, list):
        holder[:] = holder * rng.choice([2, 3, 50])
    elif kind == 5:
        for _ in range(rng.choice([1, 2, 90, 500])):
            value = [value]
        holder[key] = value
    elif kind == 6 and isinstance(value, str):
        holder[key] = value * rng.choice([0, 2, 1000])
    else:
        other, another = rng.choice(places)
        holder[key] = other[another] if another in _keys(other) and not isinstance(other[another], (dict, list)) else scalar(rng)
    return root


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` after one to four changes: bits, bytes, cuts, insertions, repeats, edge integers, joins of its own parts."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice([1, 1, 2, 4, 8, 40]))
        kind = rng.randrange(9)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice([0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF, rng.randrange(256)])
        elif kind == 2:
            del out[at:end]
        elif kind == 3:
            out[at:at] = rng.randbytes(end - at or 1)
        elif kind == 4:
            out[at:end] = out[at:end] * rng.choice([2, 3, 20])
        elif kind == 5:
            size = rng.choice([1, 2, 4, 8])
            out[at : at + size] = (rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, rng.choice(["little", "big"]))
        elif kind == 6:
            del out[at:]
        elif kind == 7:
            out[at:end] = rng.choice(PIECES)
        else:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + 20]
    return bytes(out)


def packed(root: Any) -> bytes:
    """msgpack of a tree; what it cannot hold becomes a number."""
    try:
        return msgspec.msgpack.encode(root)
    except (OverflowError, RecursionError):
        return msgspec.msgpack.encode(2**32)
