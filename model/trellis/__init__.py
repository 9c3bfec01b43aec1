"""Trellis: the looped hybrid model, as a library. `docs/api/model-interfaces.md` is its contract."""

from model.errors import CheckpointError, ModelError
from model.trellis.audit import RECONCILED_ROWS, ModelParameterReport
from model.trellis.budget import compute_parameters
from model.trellis.build import build_model, build_preset_model
from model.trellis.checkpoint import load_checkpoint, save_checkpoint
from model.trellis.config import AuxHeadSpec, TrellisConfig
from model.trellis.engine import LoopEngine
from model.trellis.errors import LoopEngineError, ModelConfigError, ModelStateError, ParameterAuditError
from model.trellis.heads import AuxiliaryHeads, ExitHeads, TiedEmbeddingHead
from model.trellis.model import TrellisModel
from model.trellis.output import AuxiliaryOutputs, BankReadout, LoopReadout, TrellisOutput
from model.trellis.router import CapacityRouter, RouterDecision
from model.trellis.settings import ModelSettings, RouterSettings
from model.trellis.specialisation import PerLoopSpecialisation
from model.trellis.state import ModelState, StateShape

__all__ = [
    "RECONCILED_ROWS",
    "AuxHeadSpec",
    "AuxiliaryHeads",
    "AuxiliaryOutputs",
    "BankReadout",
    "CapacityRouter",
    "CheckpointError",
    "ExitHeads",
    "LoopEngine",
    "LoopEngineError",
    "LoopReadout",
    "ModelConfigError",
    "ModelError",
    "ModelParameterReport",
    "ModelSettings",
    "ModelState",
    "ModelStateError",
    "ParameterAuditError",
    "PerLoopSpecialisation",
    "RouterDecision",
    "RouterSettings",
    "StateShape",
    "TiedEmbeddingHead",
    "TrellisConfig",
    "TrellisModel",
    "TrellisOutput",
    "build_model",
    "build_preset_model",
    "compute_parameters",
    "load_checkpoint",
    "save_checkpoint",
]
