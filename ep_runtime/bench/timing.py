"""Time of device work: CUDA graphs of many calls, replayed; and the ceilings that times are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

COPY_BYTES_PER_SECOND = 4.27e12
"""Device-to-device copy of one H200, bytes read plus bytes written (measured)."""

MATRIX_FLOPS = 790e12
"""Matrix product of one H200 in bfloat16, 8192 x 8192 x 8192, random data (measured)."""


def need_gpu(benchmark: str) -> None:
    """End with one line where there is no GPU, before anything is compiled."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{benchmark} measures kernels of a GPU, and there is none here")


def floor_us(num_bytes: float, flops: float) -> float:
    """The least microseconds that this many bytes and operations can take."""
    return max(num_bytes / COPY_BYTES_PER_SECOND, flops / MATRIX_FLOPS) * 1e6


def time_us(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds of one call: all calls captured in one graph, median of its replays over their number.

    Calls should touch different data, together more than the L2 cache holds.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)
