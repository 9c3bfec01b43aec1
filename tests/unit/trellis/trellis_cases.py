"""Small models for the Trellis tests, moved off their initial values, and inputs for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from model.trellis import ModelSettings, TrellisConfig, TrellisModel, TrellisOutput, build_model
from model.trellis.presets import PRESETS
from model.trellis.state import ModelState

NANO = PRESETS["trellis-nano"]
NO_SLIDING = replace(NANO, core=("gdn",) * 6)
WIDE = replace(PRESETS["trellis-180m"], vocab_size=512, bank_sub_keys=32, context=64, aux=None)
"""The shipped layers at their shipped widths, with a small vocabulary and bank."""


def full_capacity(config: TrellisConfig) -> TrellisConfig:
    return replace(config, rho=("1.0",) * config.k_max)


def make(
    config: TrellisConfig = NANO, dtype: torch.dtype = torch.float32, *, seed: int = 0, stir: float = 1.0, **settings: object
) -> TrellisModel:
    """A model whose gains, adapters, gates, routers and exits are not at their neutral values."""
    model = build_model(config, ModelSettings(**settings), seed=seed)
    for key, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(sum(key.encode()) + seed)
        with torch.no_grad():
            if "gain" in key or key.endswith((".B", "w_g")) or "routers" in key or "exit_heads" in key:
                parameter += 0.1 * stir * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def some_ids(batch: int, tokens: int, config: TrellisConfig = NANO, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def step_through(
    model: TrellisModel, ids: torch.Tensor, k: int, plan: tuple[torch.Tensor, ...] = (), state: ModelState | None = None
) -> tuple[TrellisOutput, ...]:
    """One step a token; the plan's column t goes to step t."""
    outputs = []
    state = state or model.initial_state(ids.shape[0], ids.shape[1])
    with torch.no_grad():
        for t in range(ids.shape[1]):
            out = model.step(ids[:, t], state, k=k, plan=[mask[:, t : t + 1] for mask in plan] or None)
            state = out.state
            outputs.append(out)
    return tuple(outputs)


def logits_of(outputs: tuple[TrellisOutput, ...]) -> torch.Tensor:
    return torch.cat([out.logits for out in outputs], 1)


def random_masks(model: TrellisModel, batch: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Nested masks with different counts in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    masks, previous = [], torch.ones(batch, tokens, dtype=torch.bool)
    for _ in range(model.config.k_max - 1):
        previous = previous & (torch.rand(batch, tokens, generator=generator) < 0.7)
        masks.append(previous)
    return tuple(masks)


def assert_same(left: object, right: object) -> None:
    """Equal bits, through tuples, states and dictionaries."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, ModelState):
        assert (left.position, left.batch) == (right.position, right.batch)
        written = left.position
        for name, tensor in left.tensors().items():
            part = slice(None, written) if name.startswith("global") else slice(None)
            assert torch.equal(tensor[:, part], right.tensors()[name][:, part]), name
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def greedy(model: TrellisModel, prompt: list[int], tokens: int, k: int = 1) -> tuple[list[int], list[float]]:
    """The library's own decoding with `k` loops a token: forward over the prompt, then step by step."""
    chosen, logprobs = [], []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), k=k, state=model.initial_state(1, len(prompt) + tokens), return_state=True)
        while True:
            row = out.logits[0, -1].double().log_softmax(-1)
            chosen.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            if len(chosen) == tokens:
                return chosen, logprobs
            out = model.step(chosen[-1], out.state, k=k)
