"""The parameter audit: every constructed tensor booked in one row, and the rows compared with the budget.

Two differences are known by name. The sliding layer's gate `w_g` is counted with routers, gates and norms, whose budget has no
term for it: the budget side is adjusted by it, with a note. The bank's codebooks are constructed, and in no row or total.
(With `swa_gate_inside` False the gate stands beside the row instead: the other reading of the same table, which is exact with query
and key norms in all attention layers and a norm of each bank read.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from model.trellis.budget import AUX_ROW, SERVING_ROWS, codebooks, compute_parameters
from model.trellis.config import SLIDING, TrellisConfig
from model.trellis.errors import ParameterAuditError

SWA_GATE, CODEBOOKS = "swa_kv_update_gate", "bank_sub_key_tables"
RECONCILED_ROWS = (SWA_GATE, CODEBOOKS)
"""The booking differences that are no mismatch."""
_SMALL = "routers_gates_norms"
ROW_OF_KEY: tuple[tuple[str, str], ...] = (
    (r"(prelude|core|coda)\.layers\.\d+\.(norm[12]|mixer\.(out|q|k)_norm)\.gain", _SMALL),
    (r"core\.layers\.\d+\.mixer\.w_g", SWA_GATE),
    (r"prelude\.layers\.\d+\.(mixer\.\w+_(proj|conv)|mlp\.\w+_proj)\.weight", "prelude_untied"),
    (r"core\.layers\.\d+\.(mixer\.\w+_(proj|conv)|mlp\.\w+_proj)\.weight", "core_block_tied"),
    (r"coda\.layers\.\d+\.(mixer\.\w+_(proj|conv)|mlp\.\w+_proj)\.weight", "coda_untied"),
    (r"specialisation\.adapters\.\d+\.\d+\.(q|up|down)\.[AB]", "per_loop_lora"),
    (r"specialisation\.gains\.\d+\.\d+", _SMALL),
    (r"(engine\.routers|exit_heads)\.\d+\.(weight|bias)", _SMALL),
    (r"final_norm\.gain", _SMALL),
    (r"embedding\.weight", "embeddings_tied"),
    (r"bank\.values", "memory_bank"),
    (r"bank\.points\.\d+\.[qo]_proj\.weight", "memory_bank"),
    (r"bank\.points\.\d+\.read_norm\.gain", _SMALL),
    (r"bank\.sub_keys", CODEBOOKS),
    (r"aux_heads\..+\.weight", AUX_ROW),
)
"""Patterns of state-dict keys, and the row that each one's tensors are booked in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParameterReport:
    """The table, in parameters. The gate and the codebooks are the two reconciled rows; `notes` say how."""

    prelude_untied: int
    core_block_tied: int
    coda_untied: int
    per_loop_lora: int
    routers_gates_norms: int
    embeddings_tied: int
    memory_bank: int
    serving_total: int
    training_aux_heads: int
    training_total: int
    swa_kv_update_gate: int
    bank_sub_key_tables: int
    notes: tuple[str, ...]

    def rows(self) -> dict[str, int]:
        """The ten rows of the published table, in order."""
        return {name: getattr(self, name) for name in (*SERVING_ROWS, "serving_total", AUX_ROW, "training_total")}


def audit(config: TrellisConfig, sizes: Mapping[str, int]) -> ModelParameterReport:
    """The report of tensors by state-dict key and size. Raises ParameterAuditError for any difference that has no name."""
    booked = dict.fromkeys((*SERVING_ROWS, AUX_ROW, *RECONCILED_ROWS), 0)
    for key, size in sizes.items():
        booked[row_of(key)] += size
    gate, tables = booked.pop(SWA_GATE), booked.pop(CODEBOOKS)
    budget = compute_parameters(config)
    notes = [f"{CODEBOOKS}: {tables:,} constructed, in no row and no total"]
    if config.swa_gate_inside:
        booked[_SMALL] += gate
        notes.append(f"{SWA_GATE}: {gate:,} in {_SMALL}, whose budget of {budget[_SMALL]:,} has no term for it")
        budget[_SMALL] += gate
    else:
        notes.append(f"{SWA_GATE}: {gate:,} beside {_SMALL}")
    wrong = {row: (booked[row], budget[row]) for row in booked if booked[row] != budget[row]}
    expected_gate = config.layers.count(SLIDING) * config.d_model
    if gate != expected_gate:
        wrong[SWA_GATE] = (gate, expected_gate)
    if tables != codebooks(config):
        wrong[CODEBOOKS] = (tables, codebooks(config))
    if wrong:
        said = "; ".join(f"{row} has {have:,}, its budget is {due:,}" for row, (have, due) in wrong.items())
        raise ParameterAuditError(f"constructed parameters differ from the budget: {said}")
    serving = sum(booked[row] for row in SERVING_ROWS)
    total = serving + booked[AUX_ROW]
    beside = tables + (0 if config.swa_gate_inside else gate)
    if sum(sizes.values()) != total + beside:
        raise ParameterAuditError(
            f"all tensors hold {sum(sizes.values()):,} parameters, the rows {total:,} and {beside:,} beside them"
        )
    return ModelParameterReport(
        **booked,
        serving_total=serving,
        training_total=total,
        swa_kv_update_gate=gate,
        bank_sub_key_tables=tables,
        notes=tuple(notes),
    )


def row_of(key: str) -> str:
    """The one row a tensor is booked in. Raises ParameterAuditError for a key that is in none, or in two."""
    rows = [row for pattern, row in ROW_OF_KEY if re.fullmatch(pattern, key)]
    if len(rows) != 1:
        raise ParameterAuditError(f"tensor {key} is booked in {' and '.join(rows) if rows else 'no row'}")
    return rows[0]
