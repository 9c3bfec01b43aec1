"""Trellis in float64, one sequence, one token at a time, from the published formulas and a state dictionary alone."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from model.trellis import TrellisConfig

Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, gain: torch.Tensor | float = 1.0, eps: float = 1e-6) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


class Reference:
    """`run(ids)` fills logits, hidden, masks, scores, exits, slots and weights of the bank."""

    def __init__(self, config: TrellisConfig, tensors: Tensors) -> None:
        self.c = config
        self.p = {key: tensor.double() for key, tensor in tensors.items()}
        self.entries: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, ids: list[int], k: int) -> None:
        n, part = len(ids), self.c.prelude
        self.hidden, self.masks, self.scores, self.exits, self.slots, self.weights = [], [], [], [], [], []
        h = self.p["embedding.weight"][ids]
        for layer, kind in enumerate(part):
            h = self.block(f"prelude.layers.{layer}", kind, h, list(range(n)), 0, layer)
        h = self.bank(0, h)
        alive = list(range(n))
        for j in range(1, k + 1):
            if j > 1:
                scores = rms(h) @ self.p[f"engine.routers.{j}.weight"] + self.p[f"engine.routers.{j}.bias"]
                alive = choose(scores.tolist(), alive, self.c.rho[j - 1])
                self.scores.append(scores)
                self.masks.append(torch.tensor([t in alive for t in range(n)]))
            x = h[alive]
            for layer, kind in enumerate(self.c.core):
                x = self.block(f"core.layers.{layer}", kind, x, alive, j, layer)
            h = h.clone()
            h[alive] = x
            self.hidden.append(h)
            self.exits.append(rms(h) @ self.p[f"exit_heads.{j}.weight"] + self.p[f"exit_heads.{j}.bias"])
        h = self.bank(1, h)
        for layer, kind in enumerate(self.c.coda):
            h = self.block(f"coda.layers.{layer}", kind, h, list(range(n)), 0, layer)
        self.z = rms(h, self.p["final_norm.gain"])
        self.logits = self.z @ self.p["embedding.weight"].T

    def block(self, name: str, kind: str, h: torch.Tensor, at: list[int], j: int, layer: int) -> torch.Tensor:
        gains = self.p[f"specialisation.gains.{j}.{layer}"] if j else torch.ones(2, self.c.d_model).double()
        x = rms(h, self.p[f"{name}.norm1.gain"] * gains[0])
        mix = {"gdn": self.gdn, "global": self.attention, "sliding": self.attention}[kind]
        h = h + mix(f"{name}.mixer", kind, x, at, j, layer)
        x = rms(h, self.p[f"{name}.norm2.gain"] * gains[1])
        inner = silu(x @ self.p[f"{name}.mlp.gate_proj.weight"].T) * self.site(f"{name}.mlp.up_proj", "up", x, j, layer)
        return h + self.site(f"{name}.mlp.down_proj", "down", inner, j, layer)

    def site(self, name: str, site: str, x: torch.Tensor, j: int, layer: int) -> torch.Tensor:
        out = x @ self.p[f"{name}.weight"].T
        if j >= 2:
            key = f"specialisation.adapters.{j}.{layer}.{site}"
            out = out + x @ self.p[f"{key}.A"].T @ self.p[f"{key}.B"].T
        return out

    def gdn(self, name: str, _: str, x: torch.Tensor, at: list[int], j: int, layer: int) -> torch.Tensor:
        """The recurrence over the tokens that run, the others being absent."""
        c, p = self.c, self.p
        u = torch.cat(
            (self.site(f"{name}.q_proj", "q", x, j, layer), *(x @ p[f"{name}.{w}_proj.weight"].T for w in ("k", "v"))), -1
        )
        w = torch.cat([p[f"{name}.{part}_conv.weight"] for part in ("q", "k", "v")])
        s = torch.zeros(c.gdn_heads, c.gdn_key_dim, c.gdn_value_dim).double()
        steps = torch.linspace(math.log(0.001), math.log(0.1), c.gdn_heads).double().exp()
        offsets, keys, out = torch.log(torch.exp(steps) - 1), c.gdn_heads * c.gdn_key_dim, []
        for t in range(len(at)):
            y = sum(w[:, i] * u[t - 3 + i] for i in range(4) if t - 3 + i >= 0)
            y = silu(y)
            q, k, v = (y[part].view(c.gdn_heads, -1) for part in (slice(keys), slice(keys, 2 * keys), slice(2 * keys, None)))
            q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / math.sqrt(c.gdn_key_dim)
            k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
            alpha = torch.exp(-torch.log(1 + torch.exp(p[f"{name}.a_proj.weight"] @ x[t] + offsets)))
            beta = sigmoid(p[f"{name}.b_proj.weight"] @ x[t])
            heads = []
            for i in range(c.gdn_heads):
                s[i] = alpha[i] * s[i]
                s[i] = s[i] + torch.outer(k[i], beta[i] * (v[i] - s[i].T @ k[i]))
                heads.append(rms(s[i].T @ q[i], p[f"{name}.out_norm.gain"][i], 1e-5))
            out.append(p[f"{name}.o_proj.weight"] @ torch.cat(heads))
        return torch.stack(out)

    def attention(self, name: str, kind: str, x: torch.Tensor, at: list[int], j: int, layer: int) -> torch.Tensor:
        c, p = self.c, self.p
        q = self.site(f"{name}.q_proj", "q", x, j, layer).view(len(at), c.heads, c.head_dim)
        k, v = ((x @ p[f"{name}.{w}_proj.weight"].T).view(len(at), c.kv_heads, c.head_dim) for w in ("k", "v"))
        if kind == "sliding":
            q, k = rms(q, p[f"{name}.q_norm.gain"]), rms(k, p[f"{name}.k_norm.gain"])
        q, k = self.turn(q, at), self.turn(k, at)
        if kind == "sliding" and j > 1:
            gate = sigmoid(x @ p[f"{name}.w_g"])[:, None, None]
            held_k, held_v = (part.clone() for part in self.entries[name])
            held_k[at] += gate * (k - held_k[at])
            held_v[at] += gate * (v - held_v[at])
            k, v = held_k, held_v
        self.entries[name] = (k, v)
        out = []
        for row, t in enumerate(at):
            seen = [s for s in range(k.shape[0]) if s <= t and (kind == "global" or s > t - c.window)]
            heads = []
            for head in range(c.heads):
                own = head // (c.heads // c.kv_heads)
                score = torch.exp(k[seen, own] @ q[row, head] / math.sqrt(c.head_dim))
                heads.append((score / score.sum()) @ v[seen, own])
            out.append(p[f"{name}.o_proj.weight"] @ torch.cat(heads))
        return torch.stack(out)

    def turn(self, x: torch.Tensor, at: list[int]) -> torch.Tensor:
        half = self.c.head_dim // 2
        speed = self.c.rope_theta ** (-torch.arange(half).double() / half)
        angle = (torch.tensor(at).double()[:, None] * speed)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def bank(self, point: int, h: torch.Tensor) -> torch.Tensor:
        """By brute force over all slots."""
        c, p = self.c, self.p
        out, slots, weights = [], [], []
        for row in h:
            q = (p[f"bank.points.{point}.q_proj.weight"] @ rms(row)).view(c.bank_heads, 2, c.bank_key_dim)
            read = torch.zeros(c.bank_value_dim).double()
            for halves in rms(q):
                first, second = (p["bank.sub_keys"][z] @ halves[z] / math.sqrt(c.bank_key_dim) for z in (0, 1))
                score = (first[:, None] + second[None, :]).flatten()
                best = sorted(range(c.bank_slots), key=lambda slot: (-score[slot].item(), slot))[: c.bank_top_k]
                chosen = score[best]
                weight = torch.exp(chosen) / torch.exp(chosen).sum() * (1 - torch.exp(chosen.min() - chosen))
                read += weight @ p["bank.values"][best]
                slots.append(best)
                weights.append(weight)
            out.append(row + p[f"bank.points.{point}.o_proj.weight"] @ read)
        self.slots.append(torch.tensor(slots).view(len(h), c.bank_heads, -1))
        self.weights.append(torch.stack(weights).view(len(h), c.bank_heads, -1))
        return torch.stack(out)


def choose(scores: list[float], eligible: list[int], rho: str) -> list[int]:
    """The ceil(rho n) best of the eligible, equal ones by position, in ascending order."""
    count = math.ceil(Fraction(rho) * len(scores))
    return sorted(sorted(eligible, key=lambda t: (-scores[t], t))[:count])
