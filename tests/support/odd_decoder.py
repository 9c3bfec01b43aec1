"""A decoding process that does what its job says: dies, hangs, or answers what is no answer."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from ep_runtime.frontend.vision.jobs import HEADER, Decoded, Grid, Job, frame, read_frame


def main() -> None:
    out = sys.stdout.buffer
    for piece in frame(None):
        out.write(piece)
    out.flush()
    while (body := read_frame(sys.stdin.buffer)) is not None:
        match msgspec.msgpack.decode(body, type=Job).data:
            case b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"leave":
                sys.exit(3)
            case b"hang":
                signal.pause()
            case b"large":
                out.write(HEADER.pack(2**40))
            case b"half":
                out.write(HEADER.pack(100) + b"x")
                out.flush()
                sys.exit(0)
            case b"environment":
                out.writelines(frame(Decoded(grids=[], seconds=[float("EP_SECRET" in os.environ)])))
            case data:
                grid = Grid(height=1, width=1, frames=1, pixels=data)
                out.writelines(frame(Decoded(grids=[grid], seconds=[float(os.getpid())])))
        out.flush()


if __name__ == "__main__":
    main()
