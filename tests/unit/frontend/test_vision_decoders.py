"""The pool of decoding processes: memory and time limits, processes that die or lie, and what they are given."""

from __future__ import annotations

import asyncio
import base64
import os
import select
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from ep_runtime.frontend.vision.decoders import MODULE, Decoders
from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.images import decode_image
from ep_runtime.frontend.vision.jobs import Decoded, ImageJob, VideoJob
from ep_runtime.frontend.vision.rules import ImageRules, VideoRules
from ep_runtime.frontend.vision.videos import decode_video
from tests.support.media import encoded, picture, video_file
from tests.support.python_path import python_path
from tests.unit.frontend.test_vision_images import BAD, GOOD

T = TypeVar("T")
ODD = "tests.support.odd_decoder"
RULES = ImageRules(patch=4, merge=2, shortest=256, longest=4096, resample=3)
LARGE_OUTPUT = ImageRules(patch=16, merge=2, shortest=2**27, longest=2**28, resample=3)
VIDEO = VideoRules(patch=4, merge=2, group=2, shortest=512, longest=8192, resample=3, fps=2.0, min_frames=4, max_frames=768)
MOST = 2**20


@pytest.fixture(autouse=True)
def _our_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("EP_SECRET", "not for decoders")


def job(data: bytes, rules: ImageRules = RULES, base64: bool = False, media_type: str | None = None) -> ImageJob:
    return ImageJob(data=data, base64=base64, media_type=media_type, rules=rules)


def play(
    use: Callable[[Decoders], Awaitable[T]], *, module: str = ODD, count: int = 1, seconds: float = 60, memory: int = 2**30
) -> T:
    """Use a pool in an event loop of its own; no process is left."""

    async def main() -> T:
        pool = Decoders(count=count, seconds=seconds, memory_bytes=memory, module=module)
        try:
            return await use(pool)
        finally:
            pool.close()

    return asyncio.run(main())


def test_images_and_videos_come_back() -> None:
    async def use(pool: Decoders) -> tuple[Decoded, Decoded, Decoded]:
        png = encoded(picture(30, 20))
        first = await pool.decode(job(png), MOST)
        second = await pool.decode(job(base64.b64encode(png), base64=True, media_type="image/png"), MOST)
        assert len(pool.pids) == 1
        film = video_file([picture(64, 48, seed=number) for number in range(8)])
        third = await pool.decode(VideoJob(data=film, base64=False, media_type="video/mp4", rules=VIDEO), MOST)
        return first, second, third

    first, second, third = play(use, module=MODULE)
    assert first == second
    assert len(third.grids) == len(third.seconds) == 2


def test_a_confined_process_decodes_every_format() -> None:
    async def use(pool: Decoders) -> None:
        for name, data in GOOD.items():
            assert await pool.decode(job(data), MOST) == decode_image(data, None, RULES), name
        for name, (data, _) in BAD.items():
            with pytest.raises(MediaError):
                await pool.decode(job(data), MOST)
            assert len(pool.pids) == 1, f"{name} has cost a process"
        for kind, codec in (
            ("mp4", "libx264"),
            ("mov", "mpeg4"),
            ("webm", "libvpx"),
            ("webm", "libvpx-vp9"),
            ("matroska", "libx265"),
        ):
            film = video_file([picture(64, 48, seed=number) for number in range(8)], 10, kind, codec)
            film_job = VideoJob(data=film, base64=False, media_type=None, rules=VIDEO)
            assert await pool.decode(film_job, MOST) == decode_video(film, None, VIDEO), codec

    play(use, module=MODULE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"####", "no base64"),
        (b"QUJ", "no base64"),
        (b"QUJD\n", "no base64"),
        (b"QUJD", "none of the formats"),
        (b"QQ==QQ==", "64"),
    ],
)
def test_a_refusal_costs_no_process(data: bytes, message: str) -> None:
    async def use(pool: Decoders) -> None:
        await pool.decode(job(encoded(picture(8, 8))), MOST)
        before = pool.pids
        with pytest.raises(MediaError, match=message):
            await pool.decode(job(data, base64=True), MOST)
        assert pool.pids == before

    play(use, module=MODULE)


def test_memory_is_bounded_and_files_are_out_of_reach() -> None:
    async def use(pool: Decoders) -> None:
        with pytest.raises(MediaError, match="needs more memory"):
            await pool.decode(job(encoded(picture(60, 60)), LARGE_OUTPUT), 2**30)
        (pid,) = pool.pids
        assert (await pool.decode(job(encoded(picture(8, 8))), MOST)).grids
        assert pool.pids == [pid]
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")] == ["0"]

    play(use, module=MODULE, memory=2**28)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"die", "its decoder ended: killed by SIGKILL"),
        (b"leave", "its decoder ended: exit status 3"),
        (b"half", "its decoder ended: exit status 0"),
        (b"large", "answered with 1099511627776 bytes"),
        (b"x" * 2 * MOST, "answered with"),
    ],
)
def test_a_process_that_dies_or_lies_costs_its_own_job(data: bytes, message: str) -> None:
    async def use(pool: Decoders) -> None:
        before = (await pool.decode(job(b"good"), MOST)).seconds
        with pytest.raises(MediaError, match=message):
            await pool.decode(job(data), MOST)
        assert pool.pids == []
        assert (await pool.decode(job(b"good"), MOST)).seconds != before

    play(use)


def test_a_process_that_hangs_is_replaced_and_others_go_on() -> None:
    async def use(pool: Decoders) -> None:
        hanging = asyncio.create_task(pool.decode(job(b"hang"), MOST))
        good = [await pool.decode(job(b"good"), MOST) for _ in range(3)]
        assert len({tuple(decoded.seconds) for decoded in good}) == 1
        with pytest.raises(MediaError, match=r"takes longer than 0\.5 s to decode"):
            await hanging
        assert len(pool.pids) == 1

    play(use, count=2, seconds=0.5)


def test_who_goes_away_takes_the_process_along() -> None:
    async def use(pool: Decoders) -> None:
        await pool.decode(job(b"good"), MOST)
        (pid,) = pool.pids
        hanging = asyncio.create_task(pool.decode(job(b"hang"), MOST))
        while pool.pids:
            await asyncio.sleep(0)
        await ended_by(pid, hanging.cancel)
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await pool.decode(job(b"good"), MOST)).seconds != [pid]

    play(use)


async def ended_by(pid: int, act: Callable[[], object]) -> None:
    """Wait until this process is gone after `act`."""
    descriptor = os.pidfd_open(pid)
    act()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert await asyncio.to_thread(poll.poll, 60_000)
    os.close(descriptor)


def test_the_environment_is_not_for_decoders() -> None:
    async def use(pool: Decoders) -> Decoded:
        return await pool.decode(job(b"environment"), MOST)

    assert play(use).seconds == [0.0]


def test_as_many_at_a_time_as_there_are_processes() -> None:
    async def use(pool: Decoders) -> set[float]:
        found = await asyncio.gather(*(pool.decode(job(b"good"), MOST) for _ in range(6)))
        return {decoded.seconds[0] for decoded in found}

    assert len(play(use, count=2)) == 2
