"""Errors that models and the loader raise about a folder, a tensor or a batch."""

from __future__ import annotations


class ModelError(Exception):
    """Base of what models and the loader raise about a folder, a tensor or a batch."""


class UnsupportedModel(ModelError):
    """The folder's architecture, or an option in its config.json, is not served; the message names it and what is."""


class CheckpointError(ModelError):
    """A tensor is missing, surplus, mis-shaped or non-finite, or a file is truncated; the message names it."""


class MemoryPlanError(ModelError):
    """What was asked for does not fit; the message shows the sum."""


class BatchError(ModelError):
    """A batch breaks the model's limits."""
