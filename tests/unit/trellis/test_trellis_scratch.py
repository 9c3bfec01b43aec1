"""The bound on a step's temporaries against measured peaks of the served model, phase by phase."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.base import SingleRank
from model.batch import ForwardBatch, LoopRows
from model.scratch import DIGESTED, StepSize, logit_bytes
from model.state.registry import StateRegistry
from model.trellis import TrellisConfig
from model.trellis.scratch import step_bytes
from model.trellis.served import ServedTrellis
from tests.support.allocations import peak_bytes
from tests.unit.trellis.trellis_cases import NANO

LONG = replace(NANO, context=1024)
WORST = {
    "recurrence": replace(LONG, gdn_key_dim=64, gdn_value_dim=64),
    "mlp": replace(LONG, d_model=256, mlp_dim=4096),
    "attention": replace(LONG, heads=32, kv_heads=4, head_dim=64),
    "bank": replace(LONG, bank_sub_keys=128, bank_value_dim=256, bank_top_k=32),
}
BLOCK, POSITIONS = 16, 512
STEPS = {"a prompt beside rows": (400, 3), "rows": (1, 31)}
"""Rows of the first span, and spans of one row besides."""


def measure(config: TrellisConfig, dtype: torch.dtype, loops: int, first: int, others: int) -> tuple[int, StepSize]:
    """The peak of one forward, and the step that it is."""
    model = ServedTrellis(config, rank=0, world=1, dtype=dtype, device="cpu")
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    queries = [first] + [1] * others
    spans, blocks = len(queries), POSITIONS // BLOCK
    lens = [first if first > 1 else POSITIONS] + [POSITIONS] * others
    state = StateRegistry(model.spec(), max_slots=spans, num_blocks=spans * blocks, block_size=BLOCK, dtype=dtype, device="cpu")
    batch = ForwardBatch.from_spans(
        query_lens=queries,
        seq_lens=lens,
        slots=range(spans),
        block_tables=[range(span * blocks, (span + 1) * blocks) for span in range(spans)],
        kv_write_from=[0] * spans,
        wanted_rows=[first - 1, *range(first, first + others)],
        token_ids=torch.arange(first + others) % 256,
        block_size=BLOCK,
        device="cpu",
    )
    if loops > 1:
        most = (loops,) * spans
        prompt = tuple(query > 1 for query in queries)
        batch.loops = LoopRows(most=most, thresholds=((),) * spans, depth=(0,) * spans, prompt=prompt)
    with torch.inference_mode():
        peak = peak_bytes(lambda: model.forward(batch, state, SingleRank()))
    size = StepSize(
        rows=first + others,
        slots=spans,
        scored=0,
        positions=POSITIONS,
        element=dtype.itemsize,
        world=1,
        held=0,
        device="cpu",
        kernels=False,
        head=False,
    )
    return peak, size


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("loops", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("worst", WORST)
def test_a_step_stays_below_its_bound(
    monkeypatch: pytest.MonkeyPatch, worst: str, dtype: torch.dtype, loops: int, step: str
) -> None:
    """Without what a digest takes between steps, which would hide the rest in models as small as these."""
    monkeypatch.setattr("model.trellis.scratch.DIGESTED", 0)
    peak, size = measure(WORST[worst], dtype, loops, *STEPS[step])
    bound = step_bytes(WORST[worst], size)
    assert peak <= bound
    assert bound < 5 * peak


def test_only_the_head_has_logits_and_only_captured_steps_choose_between_states() -> None:
    size = StepSize(
        rows=64, slots=64, scored=0, positions=64, element=4, world=4, held=0, device="cpu", kernels=False, head=False
    )  # fmt: skip
    wide = replace(LONG, vocab_size=1 << 20)
    assert (
        step_bytes(wide, size)
        < logit_bytes(1 << 20, replace(size, world=1, head=True))
        < step_bytes(wide, replace(size, head=True))
    )
    large = replace(LONG, gdn_key_dim=256, gdn_value_dim=256)
    assert step_bytes(large, size) > DIGESTED
    kept = 64 * 2 * (4 * 256 * 256 * 4 + 3 * 4 * 768 * 4)
    assert step_bytes(large, replace(size, kernels=True)) - step_bytes(large, size) == kept
