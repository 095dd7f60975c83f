"""Hostile clips through the decode workers: bombs, lies, playlists, mutations. Each costs its sender a 4xx."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.traffic import video_clips
from trencadis.core.errors import TrencadisError
from trencadis.multimodal.decode_workers.worker_pool import JobResult
from trencadis.multimodal.images.image_decode_client import ImageDecoder
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions, MediaPart
from trencadis.multimodal.processor_interface import PreparedVideo
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader
from trencadis.multimodal.videos.frame_sampling import FrameLimits
from trencadis.multimodal.videos.video_frontend import VideoFrontend, video_from_answer

ARRAY = video_clips.frames(np.random.default_rng(0), 8, 48, 64)
GIF, WEBP = video_clips.animation(ARRAY), video_clips.animation(ARRAY, "WEBP")


@pytest.fixture(scope="module")
def front() -> Iterator[VideoFrontend]:
    made = VideoFrontend(Qwen2VLImageProcessor(3136, 50176), MediaLoader(), ProcessorCache(0), ImageDecoder(threads=1))
    yield made
    made.loader.close()
    made.decoder.close()


def prepare(front: VideoFrontend, source: Any, room: int = 4000, **requested: Any) -> PreparedVideo:
    part = MediaPart(source, "messages[0].content[0]", MediaOptions(**requested), "video")
    return asyncio.run(front.prepare([part], room))[0]


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


def widened(data: bytes, width: int, height: int) -> bytes:
    """A GIF whose canvas is said to be larger."""
    return data[:6] + struct.pack("<HH", width, height) + data[10:]


FTYP = box(b"ftyp", b"isom\0\0\2\0isomiso2")
ATTACKS: dict[str, Any] = {
    "empty": b"",
    "text": b"hello " * 100,
    "hls playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n",
    "concat script": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "dash manifest": b"<?xml version='1.0'?><MPD><Period/></MPD>" * 5,
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\n",
    "header only": FTYP,
    "no movie": FTYP + box(b"mdat", bytes(5000)),
    "movie of zeros": FTYP + box(b"moov", bytes(5000)),
    "box larger than the file": FTYP + struct.pack(">I4s", 2**31, b"moov") + bytes(100),
    "endless boxes": FTYP + box(b"free", b"") * 50_000,
    "matroska of noise": b"\x1aE\xdf\xa3" + random.Random(0).randbytes(20_000),
    "avi of noise": b"RIFF\xff\xff\xff\x7fAVI " + random.Random(1).randbytes(20_000),
    "transport stream of zeros": (b"\x47" + bytes(187)) * 300,
    "gif of a giant canvas": widened(GIF, 65535, 65535),
    "gif of a long canvas": widened(GIF, 65535, 1),
    "gif of many large frames": widened(GIF[:-1] + GIF[400:-1] * 40, 8000, 8000),
    "gif of a million frames": GIF[:-1] + (b"\x2c" + bytes(8) + b"\0\2\1\0\0") * 1_000_000,
    "gif without frames": GIF[:13] + b";",
    "gif cut off": GIF[: len(GIF) * 2 // 3],
    "webp cut off": WEBP[: len(WEBP) * 2 // 3],
    "webp of a giant canvas": WEBP[:24] + b"\xff" * 6 + WEBP[30:],
    "frames of two sizes": [
        video_clips.png(p.resize((64 + 80 * i, 48))) for i, p in enumerate(video_clips.make_frames(ARRAY[:2]))
    ],
    "a frame that is none": [video_clips.png(video_clips.make_frames(ARRAY)[0]), b"nothing"],
    "a frame that is a playlist": [b"#EXTM3U\n"],
    "no frames": [],
    "769 frames": [b"x"] * 769,
    "a number": 7,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_refused_at_once(name: str, front: VideoFrontend) -> None:
    prepare(front, GIF)  # the worker is up
    start = time.monotonic()
    with pytest.raises(TrencadisError) as caught:
        prepare(front, ATTACKS[name])
    assert 400 <= caught.value.status < 500 and caught.value.param == "messages[0].content[0]"
    assert "passwd" not in caught.value.message and len(caught.value.message) < 200
    assert time.monotonic() - start < 15, "a hang: two frames of 64 million pixels take 2 s on a slow core"
    assert prepare(front, GIF).tokens > 0


@pytest.mark.parametrize(
    "requested",
    [
        {"nframes": 2**31 - 1}, {"fps": 1e300}, {"fps": 1e-300}, {"min_frames": 2**31 - 1}, {"max_frames": 1},
        {"video_start": 1e300}, {"total_pixels": 1}, {"min_pixels": 2**31 - 1}, {"max_pixels": 1},
        {"resized_height": 2**31 - 1, "resized_width": 2**31 - 1}, {"resized_height": 1, "resized_width": 1},
    ],
)  # fmt: skip
def test_absurd_options(requested: dict[str, Any], front: VideoFrontend) -> None:
    """A refusal, or something within the limits."""
    try:
        made = prepare(front, GIF, **requested)
    except TrencadisError as error:
        assert 400 <= error.status < 500
    else:
        assert made.resized[0] * made.resized[1] <= 50176 + 784 * 30 and len(made.indices) <= 8


def files() -> dict[str, bytes]:
    """A clip of each kind."""
    found = {"gif": GIF, "webp": WEBP}
    with_codec = [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpegts", "libx264")]
    for kind, codec in with_codec:
        found[kind] = video_clips.film(ARRAY, kind, codec)
    return found


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, repeated or dropped."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 3, 20])):
        at = rng.randrange(max(len(out), 1))
        kind = rng.randrange(5)
        if kind < 2 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
        elif kind == 3:
            del out[at : at + rng.randrange(64)]
        else:
            out[at:at] = out[at : at + rng.randrange(64)]
    return bytes(out)


def fuzz(front: VideoFrontend, count: int, seed: int) -> None:
    rng, good = random.Random(seed), files()
    outcome: dict[str, int] = {}
    for number in range(count):
        kind = list(good)[number % len(good)]
        try:
            made = prepare(front, mutated(good[kind], rng))
        except TrencadisError as error:
            assert 400 <= error.status < 500, error
            outcome[f"{kind} {error.status}"] = outcome.get(f"{kind} {error.status}", 0) + 1
        else:
            assert made.tokens < 4000
            outcome[f"{kind} ok"] = outcome.get(f"{kind} ok", 0) + 1
    print(f"{count} mutated clips: {outcome}, {front.decoder.pool.deaths} workers died")
    assert prepare(front, GIF).tokens > 0


def test_mutated_clips(front: VideoFrontend) -> None:
    fuzz(front, 120, 0)


@pytest.mark.long
def test_many_mutated_clips(front: VideoFrontend) -> None:
    fuzz(front, 6_000, 1)


def test_a_workers_lies_are_refused() -> None:
    """A worker that a clip has taken over cannot bring in sizes, counts or numbers that no clip has."""
    limits, pixels = FrameLimits(slots=1024, tokens=64), np.zeros(4 * 4 * 1176, np.uint8)
    good: dict[str, Any] = {"indices": [0, 1], "fps": 2.0, "frames": 2, "size": [56, 56], "rate": 25.0}
    assert video_from_answer(JobResult(good, [pixels]), limits, "d", 768).tokens == 4
    lies: list[dict[str, Any]] = [
        {"indices": [1, 0]}, {"indices": [0, 2]}, {"indices": [0]}, {"indices": "01"}, {"indices": [0, True]},
        {"fps": float("nan")}, {"fps": 0.0}, {"fps": "2"}, {"rate": 0.0}, {"rate": None}, {"size": [56, 57]},
        {"size": [0, 0]}, {"size": [56]},
        {"size": [5600, 5600]}, {"frames": 1}, {"frames": None}, {"indices": [0, 0, 1, 1]},
    ]  # fmt: skip
    for lie in lies:
        with pytest.raises(TrencadisError):
            video_from_answer(JobResult({**good, **lie}, [pixels]), limits, "d", 768)
    for buffers in ([], [pixels[:-1]], [pixels, pixels]):
        with pytest.raises(TrencadisError):
            video_from_answer(JobResult(good, buffers), limits, "d", 768)
