"""A decoding process: `python -P -m ep_runtime.frontend.vision.child BYTES`, jobs on stdin, replies on stdout.

What it decodes may be hostile. It has BYTES of address space, opens no file or socket, and is killed by its parent when it is late.
"""

from __future__ import annotations

import binascii
import contextlib
import importlib
import os
import pkgutil
import resource
import sys
from typing import BinaryIO

import av
import msgspec
from PIL import Image

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.images import decode_image
from ep_runtime.frontend.vision.jobs import Decoded, ImageJob, Job, Reply, Unusable, VideoJob, frame, read_frame
from ep_runtime.frontend.vision.videos import decode_video


def main() -> None:
    """Serve jobs until stdin ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    import_all()
    confine(int(sys.argv[1]))
    send(replies, None)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for this reply any more: the parent is about to kill this process
        while (body := read_frame(sys.stdin.buffer)) is not None:
            send(replies, work(body))


def import_all() -> None:
    """Import what the libraries import when they first need it: afterwards no file can be opened."""
    Image.preinit()
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def confine(address_space: int) -> None:
    """Take from this process what decoding does not need."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def work(body: bytes) -> Reply:
    """The reply to one job."""
    try:
        return decode(msgspec.msgpack.decode(body, type=Job))
    except MediaError as error:
        return Unusable(str(error))
    except MemoryError:
        return Unusable("needs more memory to decode than the server gives it")


def decode(job: Job) -> Decoded:
    """Decode; raises MediaError."""
    data = job.data
    if job.base64:
        try:
            data = binascii.a2b_base64(data, strict_mode=True)
        except binascii.Error as error:
            raise MediaError(f"is no base64: {error}") from error
    match job:
        case ImageJob():
            return decode_image(data, job.media_type, job.rules)
        case VideoJob():
            return decode_video(data, job.media_type, job.rules)


def send(stream: BinaryIO, reply: Reply | None) -> None:
    """Write one message."""
    for piece in frame(reply):
        stream.write(piece)
    stream.flush()


if __name__ == "__main__":
    main()
