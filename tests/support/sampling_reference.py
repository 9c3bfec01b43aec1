"""Token probabilities by the documented order of processing, token by token in float64, sharing nothing with the sampler."""

from __future__ import annotations

import math

import numpy as np

from protocol.messages import SamplingParams


def edited_logits(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt: list[int],
    generated: list[int],
    eos: tuple[int, ...] = (),
    allowed: set[int] | None = None,
) -> list[float]:
    """Logits after bias, min_tokens, grammar and penalties."""
    out = []
    for token, value in enumerate(logits.astype(np.float64)):
        value += params.logit_bias.get(token, 0.0)
        if len(generated) < params.min_tokens and (token in eos or token in params.stop_token_ids):
            value = -math.inf
        if allowed is not None and token not in allowed:
            value = -math.inf
        if token in prompt or token in generated:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        times = generated.count(token)
        value -= params.presence_penalty * (times > 0) + params.frequency_penalty * times
        out.append(float(value))
    return out


def kept_tokens(scaled: list[float], params: SamplingParams) -> list[int]:
    """Ids that min_p, top_k and top_p leave, best first, lowest id first among equals."""
    best = max(scaled)
    ranking = sorted((t for t in range(len(scaled)) if scaled[t] > -math.inf), key=lambda t: (-scaled[t], t))
    ranking = [t for t in ranking if math.exp(scaled[t] - best) >= params.min_p]
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
    total = math.fsum(math.exp(scaled[t] - best) for t in ranking)
    kept, mass = [], 0.0
    for token in ranking:
        kept.append(token)
        mass += math.exp(scaled[token] - best)
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
    return kept


def probabilities(edited: list[float], params: SamplingParams) -> np.ndarray:
    """float64 [V]: what the next token is drawn from."""
    if params.temperature == 0.0:
        return np.eye(len(edited))[edited.index(max(edited))]
    scaled = [value / params.temperature for value in edited]
    out = np.zeros(len(edited))
    for token in kept_tokens(scaled, params):
        out[token] = math.exp(scaled[token] - max(scaled))
    return out / out.sum()


def bitmask(allowed: set[int], vocab_size: int) -> bytes:
    """The grammar mask that allows these tokens: bit t % 8 of byte t // 8, which is the little-endian uint32 layout."""
    mask = bytearray(4 * -(-vocab_size // 32))
    for token in allowed:
        mask[token // 8] |= 1 << (token % 8)
    return bytes(mask)


def chi_square_limit(degrees: int, z: float = 5.0) -> float:
    """Upper quantile of chi-square at normal quantile z (Wilson and Hilferty 1931); z = 5 is exceeded once in 3.5 million."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + z * math.sqrt(spread)) ** 3


def assert_drawn_from(counts: np.ndarray, expected: np.ndarray) -> None:
    """Counts [V] fit probabilities [V]: nothing impossible drawn, and chi-square over cells of at least 5 expected draws."""
    assert counts[expected == 0].sum() == 0
    wanted = expected * counts.sum()
    large = wanted >= 5
    cells = [*zip(counts[large], wanted[large], strict=True), (counts[~large].sum(), wanted[~large].sum())]
    cells = [(seen, want) for seen, want in cells if want > 1e-9]
    if len(cells) > 1:
        statistic = sum((seen - want) ** 2 / max(want, 1.0) for seen, want in cells)
        assert statistic < chi_square_limit(len(cells) - 1)
