"""docs/api/model-interfaces.md says what `model.trellis` does: names, signatures, fields, guarantees, numbers."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from model import trellis
from model.trellis import TrellisModel, TrellisOutput
from tests.unit.trellis.model_docs import GENERATORS, PAGE, PART, kind, regenerate

TESTS = Path(__file__).parent / "unit" / "trellis" / "test_trellis_guarantees.py"
NAMES = {
    "TrellisModel": "module",
    "build_model": "function",
    "build_preset_model": "function",
    "ModelSettings": "dataclass",
    "RouterSettings": "dataclass",
    "AuxHeadSpec": "dataclass",
    "TrellisOutput": "dataclass",
    "LoopReadout": "dataclass",
    "BankReadout": "dataclass",
    "ModelState": "dataclass",
    "StateShape": "dataclass",
    "LoopEngine": "module",
    "CapacityRouter": "module",
    "RouterDecision": "dataclass",
    "PerLoopSpecialisation": "module",
    "TiedEmbeddingHead": "module",
    "ExitHeads": "module",
    "AuxiliaryHeads": "module",
    "ModelParameterReport": "dataclass",
    "ModelError": "exception",
}
"""What the contract exports, and as what."""
GUARANTEES = (
    "Unrolled equivalence", "Router counts", "Nesting", "Tie-break", "Skipped-token pass-through", "Loop-invariant sliding cache",
    "Global KV", "Determinism", "Auxiliary-head detachability", "Bank neutrality", "Batch-composition invariance",
    "Step vs forward", "Step vs forward", "Step vs forward",
)  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_generated_parts_are_what_the_code_gives(page: str) -> None:
    assert regenerate(page) == page
    assert sorted(part[1] for part in PART.findall(page)) == sorted(GENERATORS)


def test_a_change_of_the_code_would_be_seen(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "__all__", [*trellis.__all__[:-1]])
    assert regenerate(page) != page
    assert regenerate(page.replace("44,579,328", "44,579,329")) != page.replace("44,579,328", "44,579,329")


def test_every_name_of_the_contract_is_exported() -> None:
    assert {name: kind(name) for name in NAMES} == NAMES
    assert NAMES.keys() <= set(trellis.__all__)


def test_calls_take_what_the_contract_says(page: str) -> None:
    rest = ["k", "readout_mode", "dfg_pairs", "token_classes", "plan"]
    assert list(inspect.signature(TrellisModel.forward).parameters) == [
        "self",
        "token_ids",
        "k",
        "state",
        *rest[1:],
        "return_state",
    ]
    assert list(inspect.signature(TrellisModel.step).parameters) == ["self", "token_id", "state", *rest]
    described = re.findall(r"^\| `(\w+)` \| .*\|$", page.split("| argument |")[1].split("\n\n")[0], re.MULTILINE)
    assert described == ["token_ids", "token_id", "k", "state", *rest[1:], "return_state"]


def test_the_output_has_the_fields_of_the_contract() -> None:
    assert [field.name for field in fields(TrellisOutput)] == [
        "logits", "readouts", "exit_logits", "aux", "router_masks", "router_scores", "bank", "loop_counts", "executed_loops",
        "state", "readout_mode", "readout_applicator",
    ]  # fmt: skip


def test_every_guarantee_has_a_test_of_its_name(page: str) -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| `(test_\w+)` \|$", page, re.MULTILINE)
    assert tuple(name for name, _ in rows) == GUARANTEES
    tests = {node.name: node for node in ast.parse(TESTS.read_text()).body if isinstance(node, ast.FunctionDef)}
    for name, test in rows:
        assert test in tests
        assert test.startswith("test_" + re.sub(r"\W+", "_", name.lower()))
    assert len({test for _, test in rows}) == len(rows)


def test_pinned_numbers_are_those_of_the_test(page: str) -> None:
    (pinned,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(TESTS.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PINNED"
    )
    said = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {int(k): (float(greatest), float(usual)) for k, greatest, usual in said} == pinned


def test_the_prose_names_things_that_exist(page: str) -> None:
    """Every back-quoted identifier outside of the generated parts."""
    prose = PART.sub("", page)
    known = set(trellis.__all__) | set(dir(TrellisModel)) | {field for name in dir(trellis) for field in _fields(name)}
    known |= set(inspect.signature(TrellisModel.forward).parameters) | set(inspect.signature(TrellisModel.step).parameters)
    known |= {"indices", "as_logits", "aux", "dfg", "position", "strict", "generated", "config", "trellis_layout", "plan"}
    for quoted in re.findall(r"`([A-Za-z_]\w*)(?:\([^`]*\))?`", prose):
        assert quoted in known or quoted.startswith("test_"), quoted


def _fields(name: str) -> list[str]:
    return list(getattr(getattr(trellis, name), "__dataclass_fields__", {})) + [
        member for member in dir(getattr(trellis, name)) if not member.startswith("_")
    ]
