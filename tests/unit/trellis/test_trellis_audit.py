"""The parameter audit: every published row, the two named differences, and refusal of anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from model.trellis import (
    RECONCILED_ROWS,
    ParameterAuditError,
    TrellisConfig,
    TrellisModel,
    build_model,
    build_preset_model,
    compute_parameters,
)
from model.trellis import budget as budget_module
from model.trellis.audit import ROW_OF_KEY, audit, row_of
from tests.unit.trellis.trellis_cases import NANO, make

TABLE = {
    "prelude_untied": 13_791_744,
    "core_block_tied": 44_579_328,
    "coda_untied": 13_791_744,
    "per_loop_lora": 2_064_384,
    "routers_gates_norms": 67_335,
    "embeddings_tied": 37_748_736,
    "memory_bank": 68_681_728,
    "serving_total": 180_724_999,
    "training_aux_heads": 6_000_000,
    "training_total": 186_724_999,
}


@pytest.fixture(scope="module")
def shipped() -> TrellisModel:
    return build_preset_model("trellis-180m", device="meta")


@pytest.mark.parametrize("row", TABLE)
def test_every_row_of_the_table(shipped: TrellisModel, row: str) -> None:
    assert shipped.parameter_report().rows()[row] == TABLE[row]
    assert getattr(shipped.parameter_report(), row) == TABLE[row]


def test_the_two_reconciled_rows(shipped: TrellisModel) -> None:
    report = shipped.parameter_report(refresh=True)
    assert RECONCILED_ROWS == ("swa_kv_update_gate", "bank_sub_key_tables")
    assert (report.swa_kv_update_gate, report.bank_sub_key_tables) == (768, 196_608)
    assert compute_parameters(shipped.config)["routers_gates_norms"] == 67_335 - 768
    assert [note.split(":")[0] for note in sorted(report.notes)] == sorted(RECONCILED_ROWS)


def test_all_tensors_are_in_the_totals(shipped: TrellisModel) -> None:
    sizes = {key: tensor.numel() for key, tensor in shipped.state_dict().items()}
    assert len(sizes) == 298
    assert sum(sizes.values()) == 186_921_607
    serving = shipped.strip_aux_heads()
    assert sum(tensor.numel() for tensor in serving.values()) == 180_921_607
    assert len(serving) == 289


def test_the_configuration_without_sliding_layer() -> None:
    rows = build_preset_model("trellis-180m-nosliding", device="meta").parameter_report().rows()
    assert (rows["core_block_tied"], rows["routers_gates_norms"]) == (46_181_376, 67_591)
    assert (rows["per_loop_lora"], rows["serving_total"]) == (TABLE["per_loop_lora"], 182_327_303)


def test_the_other_reading_of_the_gate_is_exact_too() -> None:
    config = TrellisConfig(swa_gate_inside=False, qk_norm="all", bank_read_norm=True)
    report = build_model(config, device="meta").parameter_report()
    assert report.rows() == TABLE
    assert report.swa_kv_update_gate == 768
    assert compute_parameters(config)["routers_gates_norms"] == 67_335


def test_a_small_configuration_is_audited_by_the_same_formulas() -> None:
    model = make()
    assert sum(p.numel() for p in model.parameters()) == model.parameter_report().training_total + 2 * 16 * 16
    none = build_model(replace(NANO, aux=None)).parameter_report()
    assert none.training_aux_heads == 0
    assert none.serving_total == none.training_total == model.parameter_report().serving_total


@pytest.mark.parametrize("row", [row for row in TABLE if not row.endswith("total")])
def test_construction_fails_on_a_mismatch_of_any_row(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    def other(config: TrellisConfig) -> dict[str, int]:
        rows = compute_parameters(config)
        return rows | {row: rows[row] + 1}

    monkeypatch.setattr("model.trellis.audit.compute_parameters", other)
    with pytest.raises(ParameterAuditError, match=row):
        build_model(NANO, device="meta")


def test_construction_fails_on_other_reconciled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.trellis.audit.codebooks", lambda config: budget_module.codebooks(config) + 1)
    with pytest.raises(ParameterAuditError, match="bank_sub_key_tables"):
        build_model(NANO, device="meta")


def test_a_gate_of_another_size_is_no_reconciled_difference() -> None:
    sizes = {key: tensor.numel() for key, tensor in make().state_dict().items()}
    audit(NANO, sizes)
    sizes["core.layers.3.mixer.w_g"] += 1
    with pytest.raises(ParameterAuditError, match="swa_kv_update_gate has 65, its budget is 64"):
        audit(NANO, sizes)


def test_an_extra_parameter_is_found() -> None:
    model = make()
    model.core.layers[0].mixer.z_proj = nn.Linear(64, 96, bias=False)
    with pytest.raises(ParameterAuditError, match="core_block_tied"):
        model.parameter_report(refresh=True)
    model = make()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ParameterAuditError, match="scale is booked in no row"):
        model.parameter_report(refresh=True)
    assert model.parameter_report().training_total == make().parameter_report().training_total


def test_a_tensor_in_two_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.trellis.audit.ROW_OF_KEY", (*ROW_OF_KEY, (r"final_norm\..*", "memory_bank")))
    with pytest.raises(ParameterAuditError, match="routers_gates_norms and memory_bank"):
        row_of("final_norm.gain")


def test_derived_numbers(shipped: TrellisModel) -> None:
    shape = shipped.state_shape()
    assert (shape.gdn_instances, shape.sliding_caches, shape.global_kv) == (22, 1, 2)
    other = build_preset_model("trellis-180m-nosliding", device="meta").state_shape()
    assert (other.gdn_instances, other.sliding_caches, other.global_kv) == (26, 0, 2)
    assert shipped.loop_capacity_schedule() == (1.0, 1.0, 0.5, 0.25)
    assert shipped.expected_loops() == 2.75
    assert [shipped.effective_depth(k) for k in (1, 2, 3, 4)] == [4 + 6 * k for k in (1, 2, 3, 4)]
    assert (len(shipped.all_layers), len(shipped.core_layers)) == (10, 6)
    assert shipped.all_layers[2:8] == shipped.core_layers
    assert len({id(layer) for layer in shipped.all_layers}) == 10
    assert 4 * 4096 * shipped.config.vocab_size == 805_306_368


def test_the_shipped_size_runs() -> None:
    """The one test that builds all 187 million parameters: in bfloat16, a prefill and a step."""
    model = build_preset_model("trellis-180m", dtype=torch.bfloat16)
    ids = torch.arange(6).unsqueeze(0) * 7919
    with torch.no_grad():
        out = model(ids, state=model.initial_state(1, 8), return_state=True)
        step = model.step(ids[:, :1], out.state, k=1)
    assert out.logits.shape == (1, 6, 49_152)
    assert bool(out.logits.isfinite().all())
    assert out.loop_counts.tolist() == (1 + torch.stack(out.router_masks).sum(0)).tolist()
    assert [mask.sum().item() for mask in out.router_masks] == [6, 3, 2]
    assert step.state.position == 7
    assert out.state.nbytes()["sliding"] == 2_097_152
    assert out.state.gdn[0].s.nbytes == 294_912
    assert out.state.gdn[0].conv.nbytes == 16_128
    assert out.state.gdn[0].s.dtype == torch.float32
