"""Trellis as the runtime serves it: the library's modules over ragged batches, paged caches and slots of recurrent state."""

from model.trellis.served.model import ServedTrellis
from model.trellis.served.spec import trellis_spec

__all__ = ["ServedTrellis", "trellis_spec"]
