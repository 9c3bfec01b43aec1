"""The Gated DeltaNet mixer (arXiv 2412.06464) without output gate and with fixed decay offsets.

    u_t = [q(x_t); k(x_t); v(x_t)]                     channels of a depthwise causal convolution, then SiLU
    q = l2(y_q) dk^-1/2,  k = l2(y_k),  v = y_v        l2(z) = z / sqrt(sum z^2 + 1e-6), per head
    alpha = exp(-softplus(W_a x_t + c)),  beta = sigmoid(W_b x_t)
    S <- alpha S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q
    out = W_o concat_h(rms(o_h) gain_h)

`kernels.gated_delta` and `kernels.causal_conv` have the recurrence and the convolution for one sequence; sequences of a batch are
folded into heads and channels, which are independent there. Its input norms are not used: they round to float32, and a float64
model is how the tests tell logic from rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from kernels.causal_conv import conv_piece, conv_step
from kernels.gated_delta import L2_EPS, delta_chunks, delta_step
from model.trellis.config import TrellisConfig
from model.trellis.norm import Gain, wide
from model.trellis.projection import Projection, Tuning

SLOWEST, FASTEST = 0.001, 0.1
"""Step sizes of the first and the last head: half-lives of about 693 and 7 tokens at zero input."""


class GdnState(NamedTuple):
    """What a GDN layer keeps: `s [B, heads, dk, dv]`, at least float32, and `conv [B, kernel - 1, channels]`, oldest first."""

    s: torch.Tensor
    conv: torch.Tensor


class GatedDelta(nn.Module):
    """`[B, n, d] -> [B, n, d]`, with the state before and after."""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim = config.gdn_heads, config.gdn_key_dim, config.gdn_value_dim
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        self.widths = (keys, keys, values)
        self.q_proj = Projection(config.d_model, keys)
        self.k_proj = Projection(config.d_model, keys)
        self.v_proj = Projection(config.d_model, values)
        self.o_proj = Projection(values, config.d_model)
        self.a_proj = Projection(config.d_model, self.heads)
        self.b_proj = Projection(config.d_model, self.heads)
        self.q_conv = Projection(config.gdn_conv, keys)
        self.k_conv = Projection(config.gdn_conv, keys)
        self.v_conv = Projection(config.gdn_conv, values)
        self.out_norm = Gain(self.heads, self.value_dim, eps=config.gdn_eps)
        # No buffer: a constant in float32 that the module's dtype does not round and its checkpoints do not hold.
        self._offsets = decay_offsets(self.heads)

    def forward(self, x: torch.Tensor, tuning: Tuning, state: GdnState) -> tuple[torch.Tensor, GdnState]:
        """Mix n tokens; `state` is left as it is."""
        u, g, beta = self.inputs(x, tuning)
        y, conv = _convolve(u, state.conv, self.conv_weight())
        o, s = _recur(*self.heads_of(y), g, beta, state.s)
        return self.outputs(o, x.dtype), GdnState(s, conv)

    def inputs(self, x: torch.Tensor, tuning: Tuning) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows `x [..., d]`: the convolution's inputs u `[..., channels]`, log decay g and rate beta `[..., heads]`."""
        u = torch.cat((self.q_proj(x, tuning.q), self.k_proj(x), self.v_proj(x)), -1)
        dtype = wide(x.dtype)
        g = -functional.softplus(self.a_proj(x).to(dtype) + self._offsets_on(x.device).to(dtype))
        return u, g, self.b_proj(x).to(dtype).sigmoid()

    def conv_weight(self) -> torch.Tensor:
        """`[channels, kernel]`"""
        return torch.cat((self.q_conv.weight, self.k_conv.weight, self.v_conv.weight))

    def heads_of(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled unit queries, unit keys `[..., heads, dk]` and values `[..., heads, dv]` of convolved rows, at least float32."""
        dtype = wide(y.dtype)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).to(dtype) for part in y.split(self.widths, -1))
        return _unit(q) * self.key_dim**-0.5, _unit(k), v

    def outputs(self, o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[..., d]` in `dtype` from what the recurrence gave, `[..., heads, dv]`."""
        return self.o_proj(self.out_norm(o).flatten(-2).to(dtype))

    def _offsets_on(self, device: torch.device) -> torch.Tensor:
        if self._offsets.device != device:
            self._offsets = self._offsets.to(device)
        return self._offsets


def decay_offsets(heads: int) -> torch.Tensor:
    """`[heads]` float32 constants c with softplus(c) spaced geometrically from SLOWEST to FASTEST."""
    steps = torch.linspace(math.log(SLOWEST), math.log(FASTEST), heads, dtype=torch.float64, device="cpu").exp()
    return steps.expm1().log().float()


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _convolve(u: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU of the convolution of `u [B, n, C]`, and the last inputs. Both kernels carry states as `[.., C, kernel - 1]`."""
    batch, tokens, channels = u.shape
    carried = state.mT
    if tokens == 1:
        y, after = conv_step(u.squeeze(1), carried, weight)
        return y.unsqueeze(1), after.mT.contiguous()
    folded = u.transpose(0, 1).flatten(1)
    y, after = conv_piece(folded, carried.flatten(0, 1), weight.repeat(batch, 1))
    return y.unflatten(1, (batch, channels)).transpose(0, 1), after.unflatten(0, (batch, channels)).mT.contiguous()


def _recur(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, n, H, dv]` and the state after. q, k, v `[B, n, H, .]`, g and beta `[B, n, H]`."""
    if q.shape[1] == 1:
        q, k, v, g, beta = (part.squeeze(1) for part in (q, k, v, g, beta))
        o, after = delta_step(q, k, v, g, beta, s)
        return o.unsqueeze(1), after
    batch, heads = q.shape[0], q.shape[2]
    q, k, v, g, beta = (part.transpose(0, 1).flatten(1, 2) for part in (q, k, v, g, beta))
    o, after = delta_chunks(q, k, v, g, beta, s.flatten(0, 1))
    return o.unflatten(1, (batch, heads)).transpose(0, 1), after.unflatten(0, (batch, heads))
