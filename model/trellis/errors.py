"""What a Trellis model rejects. All are `model.errors.ModelError`s, and none leaves anything changed."""

from __future__ import annotations

from model.errors import ModelError


class ModelConfigError(ModelError):
    """A configuration, setting or input tensor that no model or call accepts: values, shapes, dtypes, ranges."""


class LoopEngineError(ModelError):
    """A loop count outside [1, K_max], or a routing plan that does not fit the call."""


class ModelStateError(ModelError):
    """A state bundle of another graph, batch, device or dtype, a missing one, or one without room for the call's tokens."""


class ParameterAuditError(ModelError):
    """The constructed parameters differ from the budget outside the named booking differences."""
