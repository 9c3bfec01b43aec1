"""Grouped-query attention of both kinds: over all positions, and over a window whose entries the loops refine.

q [H, hd], k, v [Hkv, hd], rotary embedding at absolute positions; softmax(q k^T / sqrt(hd)) v; query head h reads h // (H / Hkv)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from kernels.rotary import rotate
from model.trellis.config import GLOBAL, TrellisConfig
from model.trellis.norm import Gain, wide
from model.trellis.projection import Projection, Tuning
from model.trellis.state import GlobalKV
from model.trellis.window import Window, blend, put


@dataclass(frozen=True, slots=True)
class Place:
    """Which tokens of a call a layer runs, in which loop (0 outside the core), and where they stand.

    `start` is the absolute position of the call's first token, `tokens` how many it has. `index [B, m]` are the rows' numbers
    in the call, None for all of them. `cos` and `sin` are the rows' rotary tables, `[m, 1, hd]` or `[B, m, 1, hd]`.
    """

    loop: int
    start: int
    tokens: int
    index: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Absolute positions of the rows, `[1, m]` or `[B, m]`."""
        if self.index is not None:
            return self.index + self.start
        return torch.arange(self.start, self.start + self.tokens, device=self.cos.device).unsqueeze(0)


class Attention(nn.Module):
    """Projections, query and key norms where the configuration has them, and rotary embedding."""

    def __init__(self, config: TrellisConfig, kind: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Projection(config.d_model, width)
        self.k_proj = Projection(config.d_model, kv_width)
        self.v_proj = Projection(config.d_model, kv_width)
        self.o_proj = Projection(width, config.d_model)
        self.q_norm = self.k_norm = None
        if config.qk_norm == "all" or (config.qk_norm == "sliding" and kind != GLOBAL):
            self.q_norm = Gain(config.head_dim, eps=config.eps)
            self.k_norm = Gain(config.head_dim, eps=config.eps)

    def project(
        self, x: torch.Tensor, tuning: Tuning, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[..., H, hd]`, keys and values `[..., Hkv, hd]` of `x [..., d]`; q, k turned, in at least float32, then rounded.

        `cos` and `sin` are the rows' rotary tables, broadcastable to `[..., 1, hd]`.
        """
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj(x, tuning.q), self.k_proj(x), self.v_proj(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        dtype = wide(x.dtype)
        q, k = (rotate(part.to(dtype), cos, sin).to(x.dtype) for part in (q, k))
        return q, k, v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`[B, m, d]` from keys and values `[B, s, Hkv, hd]` of any dtype; mask broadcastable to `[B, H, m, s]`, bool or a bias."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class GlobalAttention(Attention):
    """Causal attention over everything written so far."""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__(config, GLOBAL)

    def forward(
        self, x: torch.Tensor, tuning: Tuning, cache: GlobalKV | None, place: Place, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`[B, n, d] -> [B, n, d]`; writes the call's keys and values into `cache`, if there is one, once.

        `bias [B, n]` is added to the scores of the call's tokens as keys; the cache keeps it.
        """
        q, k, v = self.project(x, tuning, place.cos, place.sin)
        if cache is not None:
            before = cache.rows(place.start)
            cache.write(place.start, k, v, bias)
            if torch.is_grad_enabled():
                # Views of the storage would change under autograd's feet when later tokens are written.
                k, v = torch.cat((before.k, k.to(before.k.dtype)), 1), torch.cat((before.v, v.to(before.v.dtype)), 1)
                bias = None if bias is None or before.bias is None else torch.cat((before.bias, bias), 1)
            else:
                k, v, bias = cache.rows(place.start + place.tokens)
        mask = torch.arange(k.shape[1], device=x.device) <= place.positions().unsqueeze(-1)
        if bias is None:
            return self.attend(q, k, v, mask.unsqueeze(1))
        scores = torch.where(mask, bias.unsqueeze(1), -torch.inf)
        return self.attend(q, k, v, scores.unsqueeze(1).to(q.dtype))


class SlidingAttention(Attention):
    """Attention over the last `window` positions, with one cache entry a position whatever the number of loops.

    Loop 1 writes every token's entry; a later loop moves those of its tokens, `e <- e + g (e_j - e)` with `g = sigmoid(w_g . x)`,
    and then attends. Entries hold turned keys: a position's blend is of one rotation.
    """

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__(config, "sliding")
        self.window = config.window
        self.w_g = nn.Parameter(torch.empty(config.d_model))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., d] -> [..., 1, 1]`, at least float32: how far a later loop moves the entries of these rows."""
        dtype = wide(x.dtype)
        return (x.to(dtype) * self.w_g.to(dtype)).sum(-1).sigmoid()[..., None, None]

    def forward(self, x: torch.Tensor, tuning: Tuning, window: Window, place: Place) -> tuple[torch.Tensor, Window]:
        """`[B, m, d] -> [B, m, d]` and the window after; `window` is left as it is."""
        q, k, v = self.project(x, tuning, place.cos, place.sin)
        old = window.k.shape[1] - place.tokens
        if place.loop > 1:
            gate = self.gate(x)
            k, v = (blend(entries, old, place.index, new, gate) for entries, new in zip(window, (k, v), strict=True))
        after = Window(*(put(entries, old, place.index, new) for entries, new in zip(window, (k, v), strict=True)))
        at = torch.arange(place.start - old, place.start + place.tokens, device=x.device)
        query = place.positions().unsqueeze(-1)
        mask = (at <= query) & (at > query - self.window)
        return self.attend(q, after.k, after.v, mask.unsqueeze(1)), after
