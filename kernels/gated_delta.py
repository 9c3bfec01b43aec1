"""Gated delta rule (Gated DeltaNet, arXiv 2412.06464): one token at a time, and in chunks.

With state `h [dk, dv]`, decay `a = exp(g)`, learning rate `beta`, unit keys and queries scaled by `dk ** -0.5`:
`h <- a h + k (beta (v - (a h)^T k))^T`, then `o = h^T q`. All arithmetic is float32.
"""

from __future__ import annotations

import torch

CHUNK = 64
L2_EPS = 1e-6


def delta_inputs(q: torch.Tensor, k: torch.Tensor, value_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 unit keys and scaled unit queries, repeated for the value heads: `[T, key_heads, dk]` -> `[T, value_heads, dk]`."""
    repeats = value_heads // q.shape[1]
    q, k = _unit(q.float()) * q.shape[-1] ** -0.5, _unit(k.float())
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    return q, k


def delta_gate(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log decay `g = -exp(a_log) softplus(a + dt_bias)`, float32. a `[T, value_heads]`, a_log and dt_bias `[value_heads]`."""
    return -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())


def delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of S sequences: outputs `[S, H, dv]` and new states.

    q, k `[S, H, dk]` as `delta_inputs` gives them, v `[S, H, dv]`, g and beta `[S, H]`, h `[S, H, dk, dv]`, all float32.
    """
    h = h * g.exp()[..., None, None]
    correction = (v - (k.unsqueeze(-2) @ h).squeeze(-2)) * beta.unsqueeze(-1)
    h = torch.addcmul(h, k.unsqueeze(-1), correction.unsqueeze(-2))
    return (q.unsqueeze(-2) @ h).squeeze(-2), h


def delta_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence, CHUNK at a time: outputs `[T, H, dv]` and the new state.

    q, k `[T, H, dk]` as `delta_inputs` gives them, v `[T, H, dv]`, g and beta `[T, H]`, h `[H, dk, dv]`, all float32.
    Within a chunk the corrections u solve `(I + L) u = beta (v - decay k h)`, L strictly lower: the WY form of arXiv 2406.06484.
    """
    rows = q.shape[0]
    chunks = -(-rows // CHUNK)
    q, k, v = (_chunked(x, chunks) for x in (q, k, v))
    g, beta = (_chunked(x.unsqueeze(-1), chunks).squeeze(-1) for x in (g, beta))
    decay = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * between
    right = torch.cat((v * beta.unsqueeze(-1), k_beta * decay.exp().unsqueeze(-1)), -1)
    new_values, seen_keys = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    within = (q @ k.mT) * between
    q_decayed = q * decay.exp().unsqueeze(-1)
    k_decayed = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    total = decay[..., -1].exp()[..., None, None]
    outputs = []
    for c in range(chunks):
        u = new_values[c] - seen_keys[c] @ h
        outputs.append(q_decayed[c] @ h + within[c] @ u)
        h = torch.baddbmm(h * total[c], k_decayed[c].mT, u)
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:rows], h


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _chunked(x: torch.Tensor, chunks: int) -> torch.Tensor:
    """`[T, H, d]` -> `[chunks, H, CHUNK, d]`, zero rows at the end: beta 0 and decay 1 leave the state as it is."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, chunks * CHUNK - x.shape[0]))
    return padded.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()
