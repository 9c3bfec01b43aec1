"""Every row of the contract's guarantee table, each in a test of its own name."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from model.trellis import CapacityRouter, ModelState, RouterSettings, TrellisModel, build_preset_model
from model.trellis.attention import Place
from model.trellis.config import GDN
from model.trellis.projection import NEUTRAL
from model.trellis.state import GlobalKV
from model.trellis.window import fresh_window
from tests.unit.trellis.trellis_cases import (
    NANO,
    NO_SLIDING,
    WIDE,
    assert_same,
    full_capacity,
    logits_of,
    make,
    random_masks,
    some_ids,
    step_through,
)

KS = (1, 2, 3, 4)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shipped_widths() -> TrellisModel:
    """Initial values, all tokens in all loops."""
    return make(full_capacity(WIDE), stir=0)


def unrolled(model: TrellisModel, ids: torch.Tensor, k: int) -> torch.Tensor:
    """A stack of 4 + 6 k blocks: no router, no gather, no scatter."""
    batch, tokens = ids.shape
    shape, weight = model.state_shape(), model.embedding.weight
    gdn = iter(model.initial_state(batch, tokens).gdn)
    cos, sin = model._rotary.tables(torch.arange(tokens), torch.float32)
    place = Place(0, 0, tokens, None, cos, sin)
    window = fresh_window(shape, batch, tokens, dtype=weight.dtype, device=weight.device)
    h = model.embedding(ids)
    for layer in model.prelude.layers:
        h = layer.run_gdn(h, NEUTRAL, next(gdn))[0] if layer.kind == GDN else layer.run_global(h, NEUTRAL, None, place, None)
    h, _ = model.bank(0, h)
    for loop in range(1, k + 1):
        for number, layer in enumerate(model.core_layers):
            tuning = model.specialisation.tuning(loop, number)
            if layer.kind == GDN:
                h, _ = layer.run_gdn(h, tuning, next(gdn))
            else:
                h, window = layer.run_sliding(h, tuning, window, replace(place, loop=loop))
    h, _ = model.bank(1, h)
    coda = model.initial_state(batch, tokens).gdn[-1]
    for layer in model.coda.layers:
        h = layer.run_gdn(h, NEUTRAL, coda)[0] if layer.kind == GDN else layer.run_global(h, NEUTRAL, None, place, None)
    return model.apply_readout(h)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_unrolled_equivalence(k: int, dtype: torch.dtype) -> None:
    """Every capacity 1.0: bit-identical in fp32; 2e-2 relative in bf16."""
    model, ids = make(full_capacity(NANO), dtype), some_ids(2, 19)
    with torch.no_grad():
        got, expected = model(ids, k=k).logits, unrolled(model, ids, k)
    assert got.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(got, expected)
    assert (got - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("rho", ["1.0", "0.5", "0.25", "0.1", "0.07", "1/3"])
def test_router_counts(rho: str) -> None:
    """Exactly ceil(rho n), never a function of the scores."""
    router = CapacityRouter(8, Fraction(rho), RouterSettings(), 1e-6)
    for tokens in (*range(1, 41), 100, 4096):
        due = math.ceil(Fraction(rho) * tokens)
        assert router.count(tokens) == due
        odd = torch.full((5, tokens), 0.5)
        odd[1] = torch.randn(tokens, generator=torch.Generator().manual_seed(tokens))
        odd[2] = torch.nan
        odd[3, ::2], odd[3, 1::2] = torch.inf, -torch.inf
        odd[4] = -torch.inf
        decision = router.decide(odd, None)
        assert decision.count == due
        assert decision.mask.sum(1).tolist() == [due] * 5


def test_nesting() -> None:
    """The selected set lies within that of the boundary before; without nesting a token may come back."""
    model, free = make(), make(router=RouterSettings(nested=False))
    revived = False
    with torch.no_grad():
        for seed in range(8):
            ids = some_ids(2, 33, seed=seed)
            for earlier, later in pairwise(model(ids).router_masks):
                assert not bool((later & ~earlier).any())
            masks = free(ids).router_masks
            assert [mask.sum(1).tolist() for mask in masks] == [[33, 33], [17, 17], [9, 9]]
            revived |= bool((masks[2] & ~masks[1]).any())
    assert revived


def test_tie_break() -> None:
    """Equal scores go to the lower position: the order of a sort by (score, position)."""
    router = CapacityRouter(8, Fraction("0.3"), RouterSettings(), 1e-6)
    assert router.decide(torch.zeros(1, 50), None).positions.tolist() == [list(range(15))]
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        scores = torch.randint(-2, 3, (1, 50), generator=generator).float()
        eligible = torch.randperm(50, generator=generator)[:40].sort().values[None]
        ranked = sorted((-scores[0, t].item(), t) for t in eligible[0].tolist())
        due = sorted(t for _, t in ranked[:15])
        assert router.decide(scores, eligible).positions.tolist() == [due]
        assert_same(router.decide(scores, eligible).mask, router.decide(scores, eligible).mask)


def test_scores_that_are_no_numbers_rank_last() -> None:
    """With minus infinity, by position."""
    router = CapacityRouter(8, Fraction("0.5"), RouterSettings(), 1e-6)
    scores = torch.tensor([[torch.nan, 1.0, -torch.inf, torch.nan, 0.0, torch.nan]])
    assert router.decide(scores, None).positions.tolist() == [[0, 1, 4]]
    assert router.decide(scores, torch.tensor([[2, 3, 4, 5]])).positions.tolist() == [[2, 3, 4]]


def test_skipped_token_pass_through() -> None:
    """A token that does not run a loop keeps its bits; nothing of it reaches that loop's states or the global caches."""
    model, ids = make(), some_ids(3, 14)
    with torch.no_grad():
        for out in (model(ids), model(ids, plan=random_masks(model, 3, 14))):
            for before, after, mask in zip(out.readouts, out.readouts[1:], out.router_masks, strict=False):
                assert torch.equal(after.hidden[~mask], before.hidden[~mask])
                assert bool((after.hidden[mask] != before.hidden[mask]).any(-1).all())
        start = model(ids, return_state=True).state
        nobody = torch.zeros(3, 1, dtype=torch.bool)
        first = torch.tensor([[True], [False], [True]])
        skipping = model.step(ids[:, 0], start, plan=[first, nobody, nobody]).state
        one_loop = model.step(ids[:, 0], start, k=1).state
    per_loop = NANO.core.count(GDN)
    for loop in (3, 4):
        for instance in range(1 + (loop - 1) * per_loop, 1 + loop * per_loop):
            assert_same(tuple(skipping.gdn[instance]), tuple(start.gdn[instance]))
    for instance in range(1 + per_loop, 1 + 2 * per_loop):
        for before, after in zip(start.gdn[instance], skipping.gdn[instance], strict=True):
            assert torch.equal(after[1], before[1])
            assert not torch.equal(after[0], before[0])
    for skipped, once in zip(skipping.sliding[0], one_loop.sliding[0], strict=True):
        assert torch.equal(skipped[1], once[1])
        assert not torch.equal(skipped[0], once[0])


def test_loop_invariant_sliding_cache() -> None:
    """K = 1 and K = 4: identical slots, fill and bytes, for prompts shorter and longer than the window."""
    model = make()
    for tokens in (3, 8, 21):
        with torch.no_grad():
            one, four = (model(some_ids(2, tokens), k=k, return_state=True).state for k in (1, 4))
        assert one.fill() == four.fill() == min(tokens, 8)
        assert one.nbytes() == four.nbytes()
        for left, right in zip(one.sliding[0], four.sliding[0], strict=True):
            assert left.shape == right.shape == (2, 8, 2, 16)
            assert torch.equal(left.abs().amax((0, 2, 3)) > 0, right.abs().amax((0, 2, 3)) > 0)
            assert (left.abs().amax((0, 2, 3)) > 0).tolist() == [slot < tokens for slot in range(8)]
            assert not torch.equal(left, right)
    shipped = build_preset_model("trellis-180m", device="meta").state_shape()
    assert 2 * shipped.window * shipped.kv_heads * shipped.head_dim * 2 == 2_097_152


def test_global_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written once per token per global layer, whatever K, in prefill, continuation and step."""
    model, ids, written = make(), some_ids(2, 9), []
    write = GlobalKV.write

    def counted(cache: GlobalKV, start: int, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> None:
        written.extend(range(start, start + k.shape[1]))
        write(cache, start, k, v, bias)

    monkeypatch.setattr(GlobalKV, "write", counted)
    for k in KS:
        written.clear()
        with torch.no_grad():
            state = model(ids[:, :4], k=k, return_state=True).state
            state = model(ids[:, 4:7], k=k, state=state, return_state=True).state
            for t in (7, 8):
                state = model.step(ids[:, t], state, k=k).state
        assert sorted(written) == sorted(2 * list(range(9)))
    written.clear()
    model(ids)
    assert not written


PROGRAM = """
import torch
from tests.unit.trellis.trellis_cases import make, some_ids
out = make()(some_ids(2, 17))
print([m.tolist() for m in out.router_masks], out.loop_counts.tolist(), out.logits.view(torch.int32).sum().item())
"""


def test_determinism() -> None:
    """Same input, seed and configuration: same routing, same K path, same logits, in another process too."""
    ids = some_ids(2, 17)
    first, second = make()(ids), make()(ids)
    assert_same(first.router_masks, second.router_masks)
    assert_same(first.loop_counts, second.loop_counts)
    assert_same(first.logits, second.logits)
    assert not torch.equal(make(seed=1)(ids).logits, first.logits)
    said = (
        f"{[m.tolist() for m in first.router_masks]} {first.loop_counts.tolist()} {first.logits.view(torch.int32).sum().item()}\n"
    )
    other = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert other.returncode == 0, other.stderr
    assert other.stdout == said


def test_auxiliary_head_detachability() -> None:
    """Heads on or off: logits, readouts, exit logits and routing have the same bits."""
    ids = some_ids(2, 17)
    heads, none = make()(ids, dfg_pairs=torch.zeros(2, 1, 2, dtype=torch.int64)), make(replace(NANO, aux=None))(ids)
    assert set(heads.aux) == {"boundary", "ast", "type", "dfg"}
    assert none.aux == {}
    for name in ("logits", "exit_logits", "router_masks", "router_scores", "loop_counts"):
        assert_same(getattr(heads, name), getattr(none, name))
    for left, right in zip(heads.readouts, none.readouts, strict=True):
        assert_same(left.hidden, right.hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bank_neutrality(dtype: torch.dtype) -> None:
    """Deltas forced to zero: the bits of a model whose bank is off."""
    ids = some_ids(2, 17)
    with torch.no_grad():
        zero = make(dtype=dtype, bank_force_zero_delta=True)(ids)
        off = make(dtype=dtype, bank_enabled=False)(ids)
        on = make(dtype=dtype)(ids)
    assert_same(zero.logits, off.logits)
    assert_same(zero.router_masks, off.router_masks)
    assert (len(zero.bank), len(off.bank)) == (2, 0)
    assert not torch.equal(on.logits, off.logits)


def test_batch_composition_invariance() -> None:
    """Routing and depth of a sequence do not depend on what shares the batch; with `batch_invariant` no bit does."""
    alone, strict = make(), make(batch_invariant=True)
    ids = some_ids(5, 23)
    with torch.no_grad():
        together, exact = alone(ids), strict(ids, return_state=True)
        for b in range(5):
            one, exact_one = alone(ids[b]), strict(ids[b], return_state=True)
            for mask, own in zip(together.router_masks, one.router_masks, strict=True):
                assert torch.equal(mask[b], own[0])
            assert torch.equal(together.loop_counts[b], one.loop_counts[0])
            torch.testing.assert_close(together.logits[b], one.logits[0], rtol=0, atol=1e-5)
            assert torch.equal(exact.logits[b], exact_one.logits[0])
            for name, tensor in exact_one.state.tensors().items():
                part = slice(None, 23) if name.startswith("global") else slice(None)
                assert torch.equal(exact.state.tensors()[name][b, part], tensor[0, part]), name


def test_step_vs_forward_at_k_1() -> None:
    """1e-4 absolute in fp32, over more tokens than the window holds, and going on from the middle of a sequence."""
    model, ids = make(), some_ids(2, 30)
    with torch.no_grad():
        expected = model(ids, k=1).logits
        assert (logits_of(step_through(model, ids, 1)) - expected).abs().max() <= 1e-4
        for cut in (1, 7, 8, 9, 16):
            state = model(ids[:, :cut], k=1, state=model.initial_state(2, 30), return_state=True).state
            rest = step_through(model, ids[:, cut:], 1, state=state)
            assert (logits_of(rest) - expected[:, cut:]).abs().max() <= 1e-4


def test_step_vs_forward_at_k_1_at_shipped_widths(shipped_widths: TrellisModel) -> None:
    model, ids = shipped_widths, some_ids(1, 10, WIDE)
    with torch.no_grad():
        expected = model(ids, k=1).logits
    assert (logits_of(step_through(model, ids, 1)) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("schedule", ["routed", "full"])
def test_step_vs_forward_without_sliding_layer(k: int, schedule: str) -> None:
    """Any K, no sliding layer in the core: 1e-4 absolute in fp32, and nothing but rounding, as float64 shows."""
    config = NO_SLIDING if schedule == "routed" else full_capacity(NO_SLIDING)
    for dtype, limit in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model, ids = make(config, dtype), some_ids(2, 19)
        with torch.no_grad():
            out = model(ids, k=k)
        plan = out.router_masks if schedule == "routed" else ()
        assert (logits_of(step_through(model, ids, k, plan)) - out.logits).abs().max() <= limit


PINNED = {2: (0.267, 0.0600), 3: (0.470, 0.134), 4: (0.779, 0.208)}
"""Greatest and root mean square difference of logits by K, at the shipped widths, all tokens in all loops, 10 tokens."""


@pytest.mark.parametrize("k", [2, 3, 4])
def test_step_vs_forward_in_the_shipped_configuration_diverges_by_what_is_pinned(shipped_widths: TrellisModel, k: int) -> None:
    """Does not hold for K > 1. The difference is known: it can neither grow nor vanish unseen."""
    model, ids = shipped_widths, some_ids(1, 10, WIDE)
    with torch.no_grad():
        difference = logits_of(step_through(model, ids, k)) - model(ids, k=k).logits
    assert difference[:, 0].abs().max() <= 1e-4
    greatest, usual = difference.abs().max().item(), difference.square().mean().sqrt().item()
    assert greatest == pytest.approx(PINNED[k][0], rel=0.1)
    assert usual == pytest.approx(PINNED[k][1], rel=0.1)


def test_chunked_prefill_at_k_4_depends_on_the_chunks() -> None:
    """For the same reason; at K = 1 it does not."""
    model, ids = make(full_capacity(NANO)), some_ids(1, 20)
    differences = {}
    for k in (1, 4):
        with torch.no_grad():
            first = model(ids[:, :9], k=k, return_state=True)
            second = model(ids[:, 9:], k=k, state=first.state)
            differences[k] = (torch.cat((first.logits, second.logits), 1) - model(ids, k=k).logits).abs().max().item()
    assert differences[1] <= 1e-4
    assert differences[4] == pytest.approx(0.0210, rel=0.1)


def test_step_without_plan_is_a_forward_of_one_token() -> None:
    model = make()
    with torch.no_grad():
        state = model(some_ids(2, 11), return_state=True).state
        token = some_ids(2, 1, seed=9)
        copied = replace(state, global_kv=tuple(GlobalKV(c.k.clone(), c.v.clone()) for c in state.global_kv))
        step, forward = model.step(token, state), model(token, state=copied, return_state=True)
    assert_same(step.logits, forward.logits)
    assert_same(step.state, forward.state)
    assert isinstance(step.state, ModelState)
    assert step.loop_counts.tolist() == [[4], [4]]
