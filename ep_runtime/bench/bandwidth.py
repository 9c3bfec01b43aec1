"""Memory bandwidth of this machine, measured in the run that is compared with it."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

GPU_BYTES = 2 << 30
CPU_BYTES = 512 << 20
REPEATS = 7


def gpu_copy(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy within the device's memory. Its buffers are given back."""
    source = torch.ones(GPU_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return 2 * GPU_BYTES / statistics.median(times[2:])


def cpu_read(threads: int) -> float:
    """Bytes per second that `threads` threads read together: a sum over memory far larger than any cache, best of several.

    The thread count of the process is set back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(CPU_BYTES // 4)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            data.sum()
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return CPU_BYTES / min(times)


def measure(device: torch.device) -> float:
    """Bytes per second of `device`: copies on a GPU; reads with this process's threads on a CPU."""
    return gpu_copy(device) if device.type == "cuda" else cpu_read(torch.get_num_threads())


def main() -> None:
    """`python -m ep_runtime.bench.bandwidth [--threads N]`: bytes per second that the CPU reads, as one number."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.bandwidth", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    print(cpu_read(parser.parse_args().threads))


if __name__ == "__main__":
    main()
