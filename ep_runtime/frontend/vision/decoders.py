"""The decoding processes as the frontend sees them: a few, each with one job at a time, replaced when it dies or is late."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import msgspec

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.jobs import HEADER, Decoded, Job, Reply, Unusable, frame

MODULE = "ep_runtime.frontend.vision.child"
STARTER = "ep_runtime.supervise.child"
"""Started by name: it ends its process when this one ends, then runs the module."""
PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables that a process gets: whatever else is in the environment is not for a process that reads strangers' files."""
START_SECONDS = 60.0
END_SECONDS = 1.0
"""For a process whose socket has ended to end itself."""
ENVELOPE_BYTES = 2**16
"""A reply beside its pixels; the sizes and times of a video's groups."""


class DecoderLost(Exception):
    """The process ended, or said what is no reply."""


class Decoders:
    """At most `count` processes; they are started when first needed. All methods run on one event loop, in the main thread.

    `seconds` is the longest time for one job, `memory_bytes` a process's address space. `module` is what the processes run.
    """

    def __init__(self, *, count: int, seconds: float, memory_bytes: int, module: str = MODULE) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._module = module
        self._turn = asyncio.Semaphore(count)
        self._idle: list[_Process] = []
        self._killed: list[_Process] = []
        self._closed = False

    async def decode(self, job: Job, most: int) -> Decoded:
        """Decode in a process that is free, waiting for one. `most` bytes of pixels are expected. Raises MediaError.

        A process that dies or is late ends with its job alone: the next job gets another.
        """
        async with self._turn:
            self._killed = [process for process in self._killed if process.alive]
            process = self._living() or await self._start()
            try:
                reply = await self._ask(process, job, most)
            except BaseException:  # cancelled, too: its next reply would be another job's
                self._kill(process)
                raise
            if self._closed:
                self._kill(process)
            else:
                self._idle.append(process)
        if isinstance(reply, Unusable):
            raise MediaError(reply.reason)
        return reply

    def _living(self) -> _Process | None:
        """An idle process; one that has ended meanwhile is no job's fault."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._kill(process)
        return None

    async def _start(self) -> _Process:
        process = _Process(self._module, self._memory_bytes)
        try:
            async with asyncio.timeout(START_SECONDS):
                await process.read(0)
        except BaseException:
            self._kill(process)
            raise
        return process

    def _kill(self, process: _Process) -> None:
        """End it; its exit is collected later, since giving its memory back takes up to tenths of a second."""
        process.kill()
        if self._closed:
            process.wait()
        else:
            self._killed.append(process)

    async def _ask(self, process: _Process, job: Job, most: int) -> Reply:
        try:
            async with asyncio.timeout(self._seconds):
                await process.write(frame(job))
                data = await process.read(most + ENVELOPE_BYTES)
        except TimeoutError:
            raise MediaError(f"takes longer than {self._seconds:g} s to decode") from None
        except DecoderLost as error:
            raise MediaError(f"cannot be decoded: {error}") from None
        reply: Reply = msgspec.msgpack.decode(data, type=Reply)
        return reply

    @property
    def pids(self) -> list[int]:
        """Of the processes that wait for a job."""
        return [process.pid for process in self._idle]

    def close(self) -> None:
        """Kill the processes, and wait until they are gone; those at work end with their job."""
        self._closed = True
        while self._idle:
            self._kill(self._idle.pop())
        while self._killed:
            self._killed.pop().wait()


class _Process:
    """One decoding process, and the socket that is its stdin and stdout. It is ready when it has sent the empty message."""

    def __init__(self, module: str, memory_bytes: int) -> None:
        command = [sys.executable, "-P", "-m", STARTER, str(os.getpid()), "-", module, str(memory_bytes)]
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            # A session of its own: a signal to the frontend's group lets it drain, and images being decoded belong to that.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment, start_new_session=True
            )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        """False once it has ended and its exit is collected, which this does."""
        return self._process.poll() is None

    async def write(self, pieces: list[bytes]) -> None:
        """Send one message; raises DecoderLost."""
        loop = asyncio.get_running_loop()
        try:
            for piece in pieces:
                await loop.sock_sendall(self._socket, piece)
        except ConnectionError:
            raise DecoderLost(await self._ending()) from None

    async def read(self, most: int) -> bytearray:
        """Receive one message's body; raises DecoderLost, also for one of more than `most` bytes."""
        (size,) = HEADER.unpack(await self._receive(HEADER.size))
        if size > most:
            raise DecoderLost(f"its decoder answered with {size} bytes")
        return await self._receive(size)

    async def _receive(self, size: int) -> bytearray:
        data, loop = bytearray(size), asyncio.get_running_loop()
        left = memoryview(data)
        try:
            while left:
                count = await loop.sock_recv_into(self._socket, left)
                if not count:
                    raise ConnectionResetError
                left = left[count:]
        except ConnectionError:
            raise DecoderLost(await self._ending()) from None
        return data

    async def _ending(self) -> str:
        """How it ended, now that its socket has; one that goes on without is killed."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await ended(self.pid)
        except TimeoutError:
            self._process.kill()
            await ended(self.pid)
        code = self._process.wait()
        return (
            f"its decoder ended: killed by {signal.Signals(-code).name}" if code < 0 else f"its decoder ended: exit status {code}"
        )

    def kill(self) -> None:
        """End it, whatever it does. Nothing happens to one that has ended."""
        self._socket.close()
        self._process.kill()

    def wait(self) -> None:
        """Collect the exit of one that was killed. Blocks until its memory is given back."""
        self._process.wait()


async def ended(pid: int) -> None:
    """Return when this child of ours has ended. It must not have been reaped."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
