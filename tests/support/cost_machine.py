"""A machine of round constants, for the cost model's predictions by hand."""

from __future__ import annotations

from ep_runtime.bench.cost import Fitted, Links, Machine

PLAIN = Machine(
    device="X",
    bandwidth=1e12,
    fitted=Fitted(attention=10.0, delta=20.0, grouping=3.0, row=0.5),
    links=Links(inside=1e11, reduction=8.0, peer=2.0, between=1e10, network=30.0, launch=100.0),
    prefill_rate=1e14,
    prefill_fixed=0.01,
    prefill_delta=1e-8,
)
