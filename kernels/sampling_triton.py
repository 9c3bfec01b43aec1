"""Draws from rows of logits by min_p, top_k and top_p, and a race of the tokens that are left: one program a row, and no sort.

The order of processing and the race are those of `ep_runtime.engine.sampler`. A token's key is the magnitude of its scaled logit
(logit - best) / temperature, as an integer: the smaller, the better. What a filter leaves are the keys below a cut, and of those
that equal it the lowest ids. Cuts are found by halving (or dividing by eight) the range of keys.

Most rows have few tokens that matter. One pass over the row tells the least of some fixed magnitudes that holds all that filters
can leave; if that leaves at most `cap` tokens, they are copied together, and all else works on them. If it leaves more, the same
searches are passes over the row. A token whose scaled logit is below -FURTHEST cannot win the race against the best, which no
filter removes: log E lies between log(2^-32) and log(24 log 2), 25.0 apart. So such tokens are counted, and otherwise left out.
Where fewer than top_k tokens are nearer than that, top_p's total lacks the others': less than float32's rounding.

Masses are summed in float64 (over a whole row, four float32 ones first), in an order that the row alone decides, not the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

CAP = 4096
"""Most tokens that are copied together."""

LINES = 4
LANES = 2048
"""A program works on LINES * LANES tokens at a time: 32 KB of float32, enough under way to keep a multiprocessor busy."""

WARPS = 16
INFINITY = tl.constexpr(0x7F800000)
"""The key of a token that cannot be drawn."""
NOBODY = tl.constexpr(0x7FFFFFFF)
"""Above every key and every id."""
FURTHEST = tl.constexpr(25.5)
CLEAR_OF_ROUNDING = tl.constexpr(1.00001)


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    noise: torch.Tensor,
    keys: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    vocab_size: int,
    *,
    cap: int = CAP,
    lanes: int = LANES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, status) [w] int64 and int32 (a `RowStatus`) of the rows `rows` [w] int64 of `logits` [W, V or more] float32.

    temperature, noise (1, or 0 for the best token), log_min_p (-inf is off) are float32 [w], top_k int64 [w] (vocab_size or more is
    off), top_p float64 [w] (inf is off), keys int32 [w, 2]. `cap` and `lanes`, powers of two, are smaller in tests alone.
    """
    if logits.stride(1) != 1 or logits.dtype != torch.float32:
        raise ValueError("rows of logits must be contiguous, and float32")
    count = len(rows)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    status = torch.empty(count, dtype=torch.int32, device=logits.device)
    gathered = torch.empty(count, 2, cap, dtype=torch.int32, device=logits.device)
    if count:
        _sample_kernel[(count,)](
            logits,
            rows,
            temperature,
            noise,
            keys,
            log_min_p,
            top_k,
            top_p,
            gathered,
            tokens,
            status,
            logits.stride(0),
            vocab_size,
            CAP=cap,
            LINES=LINES,
            LANES=lanes,
            num_warps=WARPS,
        )
    return tokens, status


@triton.jit
def _sample_kernel(
    logits,
    rows,
    temperature,
    noise,
    keys,
    log_min_p,
    top_k,
    top_p,
    gathered,
    tokens,
    status,
    stride,
    vocab,
    CAP: tl.constexpr,
    LINES: tl.constexpr,
    LANES: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    line = logits + tl.load(rows + number) * stride
    best = _best(line, vocab, LINES, LANES)
    state = tl.where(best == float("inf"), 2, tl.where(best == float("-inf"), 1, 0))
    token = tl.full([], 0, tl.int32)
    if state == 0:
        heat, floor = tl.load(temperature + number), tl.load(log_min_p + number)
        loud, low, high = tl.load(noise + number), tl.load(keys + number * 2), tl.load(keys + number * 2 + 1)
        most = tl.minimum(tl.load(top_k + number), vocab).to(tl.int32)
        share = tl.load(top_p + number)
        own = gathered + number * (2 * CAP)
        found = tl.full([], CAP + 1, tl.int32)
        total = tl.full([], 0.0, tl.float64)
        # Without filters all tokens run the race. The mass of so many best ones as are not copied together needs their exact cut.
        if ((most == vocab) & (share < float("inf"))) | ((most < vocab) & (most <= CAP)):
            reach, total = _reach(line, vocab, best, heat, floor, most, share, LINES, LANES)
            found = _gather(line, vocab, best, heat, floor, reach, own, CAP, LINES * LANES)
        if found <= CAP:
            tl.debug_barrier()
            token = _draw_gathered(own, found, vocab, most, share, total, low, high, loud, CAP)
        else:
            cut, last = _cut(line, vocab, best, heat, floor, most, share, LINES, LANES)
            token = _draw(line, vocab, best, heat, floor, cut, last, low, high, loud, LINES, LANES)
    tl.store(tokens + number, token.to(tl.int64))
    tl.store(status + number, state)


@triton.jit
def _best(line, vocab, LINES: tl.constexpr, LANES: tl.constexpr):
    """The largest logit. A NaN counts as +inf: either makes the row unusable."""
    at = tl.arange(0, LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full([LINES, LANES], float("-inf"), tl.float32)
    for start in range(0, vocab, LINES * LANES):
        value = tl.load(line + start + at, mask=start + at < vocab, other=float("-inf"))
        best = tl.maximum(best, tl.where(value != value, float("inf"), value))
    return tl.max(tl.max(best, 0), 0)


@triton.jit
def _keys(line, at, vocab, best, heat, floor):
    """The keys of the tokens `at`. A magnitude's bits ascend with it."""
    value = tl.load(line + at, mask=at < vocab, other=float("-inf"))
    gap = value - best
    # The exact division is slow for infinities, which a grammar makes of most tokens.
    scaled = tl.div_rn(tl.where(gap == float("-inf"), -1.0, gap), tl.zeros_like(gap) + heat)
    scaled = tl.where((gap == float("-inf")) | (scaled < floor), float("-inf"), scaled)
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass(key):
    """A token's probability relative to the best one's, float32."""
    return tl.exp(0.0 - key.to(tl.float32, bitcast=True))


@triton.jit
def _log_exponential(token, low, high):
    """log E of tokens: `ep_runtime.engine.sampling.random`, in which the words of a token and of a row's key are made, too."""
    bits = token.to(tl.uint32) + 1
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) ^ low.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D + high.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    u = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077392578125e-10, 0.999999940395355224609375)
    # -log(1 - u), exact to rounding for small u, too: the error of 1 - u is in both of log(w) and w - 1.
    w = 1.0 - u
    exact = w == 1.0
    return tl.log(tl.where(exact, u, u * tl.div_rn(tl.log(w), tl.where(exact, 1.0, w - 1.0))))


@triton.jit
def _sums(
    line, vocab, best, heat, floor, limits, counting, by_id, of_key, until_key, until_id, LINES: tl.constexpr, LANES: tl.constexpr
):
    """[8] float64: how many tokens, or how much mass, lie at or below each of the ascending `limits` [8] int32.

    Limits are of keys; `by_id`, of the ids of tokens whose key is `of_key`. Tokens after (until_key, until_id) do not count.
    """
    at = tl.arange(0, LINES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    sums = tl.zeros([8, LANES], tl.float64)
    for start in range(0, vocab, LINES * LANES):
        token = start + at
        key = _keys(line, token, vocab, best, heat, floor)
        weight = tl.where(counting, 1.0, _mass(key))
        counts = (key < until_key) | ((key == until_key) & (token <= until_id))
        place = tl.where(by_id, tl.where(key == of_key, token, NOBODY), key)
        place = tl.where(counts, place, NOBODY)
        below = place <= limits[:, None, None]
        sums += tl.sum(tl.where(below, weight, 0.0), 1).to(tl.float64)
    return tl.sum(sums, 1)


@triton.jit
def _reach(line, vocab, best, heat, floor, most, share, LINES: tl.constexpr, LANES: tl.constexpr):
    """(the least of some magnitudes, as a key, that holds all that filters can leave and that can win; the row's mass)."""
    each = tl.arange(0, 8)
    steps = tl.where(each == 0, 1.0, tl.where(each == 1, 2.5, tl.where(each == 2, 5.0, tl.where(each == 3, 8.0, FURTHEST))))
    steps = tl.where(each == 4, 12.0, tl.where(each == 5, 18.0, tl.where(each == 7, float("inf"), steps)))
    limits = steps.to(tl.float32).to(tl.int32, bitcast=True)
    counting = most < vocab
    sums = _sums(line, vocab, best, heat, floor, limits, counting, False, 0, NOBODY, 0, LINES, LANES)
    total = tl.sum(tl.where(each == 7, sums, 0.0), 0)
    need = tl.where(counting, most.to(tl.float64), total * share * CLEAR_OF_ROUNDING)
    short = tl.minimum(tl.sum((sums < need).to(tl.int32), 0), 6)
    return tl.sum(tl.where(each == short, limits, 0), 0), total


@triton.jit
def _gather(line, vocab, best, heat, floor, reach, own, CAP: tl.constexpr, TILE: tl.constexpr):
    """Copy keys up to `reach` and their ids to `own` [2, CAP], in an order that the vocabulary alone decides. Their number.

    One pass counts them, another copies them, unless there are more than CAP.
    """
    # Times a factor that the compiler does not know to be 1, so that a thread takes single tokens: it would load several side by
    # side, and then exchange them between threads, for the scattered stores.
    at = tl.arange(0, TILE) * tl.where(vocab > 0, 1, 0)
    counts = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        counts += (_keys(line, start + at, vocab, best, heat, floor) <= reach).to(tl.int32)
    found = tl.sum(counts, 0)
    if found <= CAP:
        place = tl.cumsum(counts, 0) - counts
        for start in range(0, vocab, TILE):
            key = _keys(line, start + at, vocab, best, heat, floor)
            near = key <= reach
            tl.store(own + place, key, mask=near)
            tl.store(own + CAP + place, start + at, mask=near)
            place += near.to(tl.int32)
    return found


@triton.jit
def _least(value, weight, need):
    """The least value at or below which weights sum to `need`; NOBODY if there is none."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], NOBODY, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(value <= middle, weight, 0), 0) >= need
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def _up_to(key, token, alive, cut, equals):
    """Of what is alive, the keys below `cut`, and of those that equal it the `equals` of the lowest ids."""
    ties = (alive & (key == cut)).to(tl.int32)
    last = tl.full([], NOBODY, tl.int32)
    if tl.sum(ties, 0) > equals:
        last = _least(token, ties, equals)
    return alive & ((key < cut) | ((key == cut) & (token <= last)))


@triton.jit
def _draw_gathered(own, found, vocab, most, share, total, low, high, loud, CAP: tl.constexpr):
    """The winner among the `found` gathered tokens that top_k and top_p leave. `total` is top_p's where top_k is off."""
    at = tl.arange(0, CAP)
    key = tl.load(own + at, mask=at < found, other=NOBODY)
    token = tl.load(own + CAP + at, mask=at < found, other=NOBODY)
    alive = at < found
    if (most < vocab) & (most < found):
        cut = _least(key, alive.to(tl.int32), most)
        alive = _up_to(key, token, alive, cut, most - tl.sum((key < cut).to(tl.int32), 0))
    if share < float("inf"):
        mass = tl.where(alive, _mass(tl.where(alive, key, INFINITY)), 0.0).to(tl.float64)
        need = share * tl.where(most < vocab, tl.sum(mass, 0), total)
        cut = _least(key, mass, need)
        if cut < NOBODY:
            one = tl.max(tl.where(key == cut, mass, 0.0), 0)
            equals = tl.ceil((need - tl.sum(tl.where(key < cut, mass, 0.0), 0)) / one)
            alive = _up_to(key, token, alive, cut, equals.to(tl.int32))
    score = 0.0 - key.to(tl.float32, bitcast=True) - _log_exponential(token, low, high) * loud
    score = tl.where(alive, score, float("-inf"))
    return tl.min(tl.where(alive & (score == tl.max(score, 0)), token, NOBODY), 0)


@triton.jit
def _cut(line, vocab, best, heat, floor, most, share, LINES: tl.constexpr, LANES: tl.constexpr):
    """(key, id) of the last token, in order of keys and then of ids, that top_k and top_p leave, by passes over the row.

    Four searches, of which those that are not needed are left out: top_k's key, the id among equals, top_p's key, the id.
    """
    each = tl.arange(0, 8)
    cut, last = tl.full([], INFINITY, tl.int32), tl.full([], NOBODY, tl.int32)
    until_key, until_id = cut, last
    need = most.to(tl.float64)
    for turn in range(4):
        by_id, counting = turn % 2 == 1, turn != 2
        until_key, until_id = tl.where(turn == 2, cut, until_key), tl.where(turn == 2, last, until_id)
        on = tl.where(turn < 2, most < vocab, share < float("inf"))
        on = on & ((by_id == 0) | (need > 0.0))
        first, final = tl.full([], 0, tl.int32), tl.where(by_id, vocab - 1, INFINITY)
        under, upto = need * 0.0, need * 0.0
        passes = tl.full([], 0, tl.int32)
        while on & ((first < final) | (passes == 0)):
            width = (final - first) // 8 + 1
            limits = tl.minimum(first + width * each + (width - 1), final)
            sums = _sums(line, vocab, best, heat, floor, limits, counting, by_id, cut, until_key, until_id, LINES, LANES)
            need = tl.where((turn == 2) & (passes == 0), share * tl.max(sums, 0), need)
            short = tl.minimum(tl.sum((sums < need).to(tl.int32), 0), 7)
            under = tl.where(short > 0, tl.sum(tl.where(each == short - 1, sums, 0.0), 0), under)
            upto = tl.sum(tl.where(each == short, sums, 0.0), 0)
            final = tl.sum(tl.where(each == short, limits, 0), 0)
            first = tl.minimum(first + width * short, final)
            passes += 1
        if on:
            cut = tl.where(by_id, cut, final)
            last = tl.where(cut == until_key, until_id, NOBODY)
            last = tl.where(by_id, tl.minimum(last, final), last)
            # How many equals of the cut stay: with one alone, no id need be looked for.
            one = tl.where(counting, 1.0, tl.max(_mass(cut + each * 0), 0).to(tl.float64))
            need = tl.where(upto - under < 1.5 * one, 0.0, tl.ceil((need - under) / one))
    return cut, last


@triton.jit
def _draw(line, vocab, best, heat, floor, cut, last, low, high, loud, LINES: tl.constexpr, LANES: tl.constexpr):
    """The winner among the tokens up to (cut, last), by a pass over the row."""
    at = tl.arange(0, LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best_score = tl.full([LINES, LANES], float("-inf"), tl.float32)
    winner = tl.full([LINES, LANES], NOBODY, tl.int32)
    for start in range(0, vocab, LINES * LANES):
        token = start + at
        key = _keys(line, token, vocab, best, heat, floor)
        alive = (key < INFINITY) & ((key < cut) | ((key == cut) & (token <= last)))
        score = 0.0 - key.to(tl.float32, bitcast=True) - _log_exponential(token, low, high) * loud
        better = alive & (score > best_score)
        best_score = tl.where(better, score, best_score)
        winner = tl.where(better, token, winner)
    top = tl.max(tl.max(best_score, 0), 0)
    return tl.min(tl.min(tl.where(best_score == top, winner, NOBODY), 0), 0)
