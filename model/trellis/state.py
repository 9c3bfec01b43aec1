"""What a sequence leaves behind: states of the recurrent layers, the sliding cache, the global caches, and the position.

Bundles are frozen. An advance returns a new one, in which untouched instances are the same objects; only the storage of the global
caches is shared and written in place, at rows from `position` on. So an old bundle is a checkpoint to go back to, and rows at or
after `position` are garbage; two living branches of one bundle need clones of the global caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from model.trellis.config import GDN, GLOBAL, SLIDING, TrellisConfig
from model.trellis.delta import GdnState
from model.trellis.errors import ModelStateError
from model.trellis.norm import wide


class KvRows(NamedTuple):
    """Leading rows of a global cache: `k`, `v [B, rows, Hkv, hd]`, and `bias [B, rows]` where keys have one."""

    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GlobalKV:
    """One global layer's storage: `k`, `v [B, capacity, Hkv, hd]` in the cache's dtype, `bias [B, capacity]` float32 or None."""

    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Rows from `start` on, in place: the only writer. The caller has checked the capacity."""
        with torch.no_grad():
            rows = slice(start, start + k.shape[1])
            self.k[:, rows] = k
            self.v[:, rows] = v
            if self.bias is not None:
                self.bias[:, rows] = 0.0 if bias is None else bias

    def rows(self, stop: int) -> KvRows:
        """Views of the first `stop` rows."""
        return KvRows(self.k[:, :stop], self.v[:, :stop], None if self.bias is None else self.bias[:, :stop])


class SlidingCache(NamedTuple):
    """A ring `k`, `v [B, window, Hkv, hd]`: position p has slot p mod window."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """How many instances a graph needs, and their sizes, so that a bundle of another configuration is told apart."""

    gdn_instances: int
    sliding_caches: int
    global_kv: int
    gdn_state: tuple[int, int, int]
    """heads, key size, value size"""
    gdn_conv: tuple[int, int]
    """inputs carried, channels"""
    window: int
    kv_heads: int
    head_dim: int
    key_bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """Every state instance of a batch of sequences that stand at one `position`, with room for `capacity` tokens.

    `gdn` is in the order prelude; loop 1's core layers, ..., loop K_max's; coda.
    """

    position: int
    batch: int
    capacity: int
    gdn: tuple[GdnState, ...]
    sliding: tuple[SlidingCache, ...]
    global_kv: tuple[GlobalKV, ...]

    def fill(self) -> int:
        """Entries that each sliding cache holds."""
        return min(self.position, self.sliding[0].k.shape[1]) if self.sliding else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by instance and field."""
        found: dict[str, torch.Tensor] = {}
        for number, state in enumerate(self.gdn):
            found |= {f"gdn[{number}].s": state.s, f"gdn[{number}].conv": state.conv}
        for number, ring in enumerate(self.sliding):
            found |= {f"sliding[{number}].k": ring.k, f"sliding[{number}].v": ring.v}
        for number, cache in enumerate(self.global_kv):
            found |= {f"global_kv[{number}].{name}": getattr(cache, name) for name in ("k", "v")}
            if cache.bias is not None:
                found[f"global_kv[{number}].bias"] = cache.bias
        return found

    def nbytes(self) -> dict[str, int]:
        """Bytes of the instances of each kind."""
        sizes = dict.fromkeys(("gdn", "sliding", "global_kv"), 0)
        for name, tensor in self.tensors().items():
            sizes[name.split("[")[0]] += tensor.nbytes
        return sizes


def shape_of(config: TrellisConfig, *, key_bias: bool) -> StateShape:
    """Instances and sizes of the configuration's graph."""
    outer = config.prelude + config.coda
    return StateShape(
        gdn_instances=outer.count(GDN) + config.k_max * config.core.count(GDN),
        sliding_caches=config.core.count(SLIDING),
        global_kv=outer.count(GLOBAL),
        gdn_state=(config.gdn_heads, config.gdn_key_dim, config.gdn_value_dim),
        gdn_conv=(config.gdn_conv - 1, config.gdn_channels),
        window=config.window,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        key_bias=key_bias,
    )


def zero_gdn(shape: StateShape, batch: int, *, dtype: torch.dtype, device: torch.device) -> tuple[GdnState, ...]:
    """Zeros for every GDN instance of a model of that dtype."""
    return tuple(
        GdnState(
            torch.zeros(batch, *shape.gdn_state, dtype=wide(dtype), device=device),
            torch.zeros(batch, *shape.gdn_conv, dtype=dtype, device=device),
        )
        for _ in range(shape.gdn_instances)
    )


def zero_state(
    shape: StateShape, batch: int, capacity: int, *, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> ModelState:
    """All zeros at position 0. `dtype` is the model's. Raises ModelStateError for odd sizes or cache dtypes."""
    for name, value in (("batch", batch), ("capacity", capacity)):
        if type(value) is not int or value < 1:
            raise ModelStateError(f"{name} = {value!r} is not a positive integer")
    if not cache_dtype.is_floating_point:
        raise ModelStateError(f"caches hold floating-point numbers, not {cache_dtype}")

    def zeros(*size: int, kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(batch, *size, dtype=kind, device=device)

    ring, rows = (shape.window, shape.kv_heads, shape.head_dim), (capacity, shape.kv_heads, shape.head_dim)
    return ModelState(
        position=0,
        batch=batch,
        capacity=capacity,
        gdn=zero_gdn(shape, batch, dtype=dtype, device=device),
        sliding=tuple(
            SlidingCache(zeros(*ring, kind=cache_dtype), zeros(*ring, kind=cache_dtype)) for _ in range(shape.sliding_caches)
        ),
        global_kv=tuple(
            GlobalKV(
                zeros(*rows, kind=cache_dtype),
                zeros(*rows, kind=cache_dtype),
                zeros(capacity, kind=torch.float32) if shape.key_bias else None,
            )
            for _ in range(shape.global_kv)
        ),
    )


def check_state(
    state: object, shape: StateShape, batch: int, tokens: int, *, dtype: torch.dtype, device: torch.device
) -> ModelState:
    """The bundle, if a call of `batch` sequences and `tokens` tokens each may go on from it; ModelStateError otherwise."""
    if not isinstance(state, ModelState):
        raise ModelStateError(f"state is {type(state).__name__}, not a ModelState")
    counts = (len(state.gdn), len(state.sliding), len(state.global_kv))
    if counts != (shape.gdn_instances, shape.sliding_caches, shape.global_kv):
        raise ModelStateError(f"the bundle has {counts} GDN, sliding and global instances; the model needs {shape}")
    if state.batch != batch:
        raise ModelStateError(f"the bundle is of {state.batch} sequences, the call of {batch}")
    if state.position + tokens > state.capacity:
        raise ModelStateError(f"{tokens} tokens at position {state.position} pass the bundle's capacity of {state.capacity}")
    expected = _sizes(shape, batch, state.capacity)
    tensors = state.tensors()
    if shape.key_bias != any(name.endswith(".bias") for name in tensors):
        raise ModelStateError(f"the bundle {'lacks' if shape.key_bias else 'has'} key biases, the model's settings say otherwise")
    for name, tensor in tensors.items():
        kind = name.split("[")[0] + name[name.index(".") :]
        if tuple(tensor.shape) != expected[kind]:
            raise ModelStateError(f"{name} is {tuple(tensor.shape)}, not {expected[kind]}")
        if tensor.device.type != device.type or (tensor.device.index or 0) != (device.index or 0):
            raise ModelStateError(f"{name} is on {tensor.device}, the model on {device}")
        wanted = {"gdn.s": wide(dtype), "gdn.conv": dtype, "global_kv.bias": torch.float32}.get(kind)
        if wanted not in (None, tensor.dtype) or not tensor.dtype.is_floating_point:
            raise ModelStateError(f"{name} is {tensor.dtype}, not {wanted or 'floating-point'}")
    return state


def _sizes(shape: StateShape, batch: int, capacity: int) -> dict[str, tuple[int, ...]]:
    ring, rows = (batch, shape.window, shape.kv_heads, shape.head_dim), (batch, capacity, shape.kv_heads, shape.head_dim)
    return {
        "gdn.s": (batch, *shape.gdn_state), "gdn.conv": (batch, *shape.gdn_conv), "sliding.k": ring, "sliding.v": ring,
        "global_kv.k": rows, "global_kv.v": rows, "global_kv.bias": (batch, capacity),
    }  # fmt: skip
