"""The name under which transformers' models take their cache: it was `past_key_values` before 5.24."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` as a keyword argument of `model`."""
    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}
