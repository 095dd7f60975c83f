"""The frontend for videos: sources, cache, uuids, salts, limits; decoding runs in a worker."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traffic import video_clips
from trencadis.core.errors import BadRequest, Conflict, Forbidden, QueueFull, TooLarge, TrencadisError
from trencadis.multimodal.images.image_decode_client import ImageDecoder
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_OPTIONS, MediaOptions, MediaPart, MediaScope
from trencadis.multimodal.media_timing_and_concurrency import MediaTimes, record_media_times
from trencadis.multimodal.processor_interface import PreparedVideo
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader
from trencadis.multimodal.videos.video_frontend import VideoFrontend, VideoLimits

PATH = "messages[0].content[0]"
ARRAY = video_clips.frames(np.random.default_rng(0), 5, 48, 64)
GIF = video_clips.animation(ARRAY)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder(threads=1)
    yield made
    made.close()


@pytest.fixture
def front(decoder: ImageDecoder, tmp_path: Path) -> VideoFrontend:
    (tmp_path / "clip.gif").write_bytes(GIF)
    loader = MediaLoader((), tmp_path, max_bytes=1 << 20)
    return VideoFrontend(
        Qwen2VLImageProcessor(3136, 50176), loader, ProcessorCache(1 << 28), decoder, VideoLimits(2, 8, 60.0)
    )


def prepare(front: VideoFrontend, *parts: MediaPart, scope: MediaScope | None = None) -> list[PreparedVideo]:
    return asyncio.run(front.prepare(parts, 1000, scope or MediaScope()))


def part(source: Any, options: MediaOptions = NO_OPTIONS, uuid: str | None = None) -> MediaPart:
    return MediaPart(source, PATH, options, "video", uuid)


def test_every_source_gives_the_same_patches(front: VideoFrontend, tmp_path: Path) -> None:
    url = f"data:video/gif;base64,{base64.b64encode(GIF).decode()}"
    sources = [GIF, url, f"file://{tmp_path}/clip.gif", Path("clip.gif"), tmp_path / "clip.gif"]
    made = [prepare(front, part(source))[0] for source in sources]
    assert all(m is made[0] for m in made), "equal bytes and options are prepared once"
    assert (front.cache.queries, front.cache.hits) == (5, 4)
    lists: list[Any] = [
        video_clips.make_frames(ARRAY),
        ARRAY,
        [video_clips.png(p) for p in video_clips.make_frames(ARRAY)],
    ]
    three = [prepare(front, part(frames))[0] for frames in lists]
    digests = [[p.digest for p in video.patches] for video in three]
    assert digests[0] == digests[1] == digests[2] and len(digests[0]) == 3


def test_order_and_the_first_error(front: VideoFrontend) -> None:
    short, long = part(ARRAY[:2]), part(ARRAY[:4])
    assert [len(v.patches) for v in prepare(front, long, short)] == [2, 1]
    with pytest.raises(TrencadisError) as caught:
        prepare(front, short, MediaPart(b"nothing", "messages[3].content[1]", kind="video"))
    assert (caught.value.status, caught.value.param) == (415, "messages[3].content[1]")


def test_options_of_the_server_give_way_to_a_requests(front: VideoFrontend) -> None:
    front.options = MediaOptions(nframes=2, max_pixels=10_000)
    (own,) = prepare(front, part(GIF))
    (requested,) = prepare(front, part(GIF), scope=MediaScope(options=MediaOptions(nframes=4)))
    assert (len(own.indices), len(requested.indices)) == (2, 4) and own.resized == requested.resized
    scope = MediaScope(options=MediaOptions(nframes=2), videos=MediaOptions(nframes=4))
    assert len(prepare(front, part(GIF), scope=scope)[0].indices) == 4, "those of images are not theirs"
    (faster,) = prepare(front, part(GIF), scope=MediaScope(options=MediaOptions(fps=100.0)))
    assert len(faster.indices) > 2, "fps of a request takes the place of the server's nframes"


def test_options_of_the_request_and_of_the_part(front: VideoFrontend) -> None:
    scope = MediaScope(options=MediaOptions(nframes=2, max_pixels=10_000))
    first, second = prepare(front, part(GIF), part(GIF, MediaOptions(nframes=4)), scope=scope)
    assert (len(first.indices), len(second.indices)) == (2, 4) and first.resized == second.resized
    assert first.resized[0] * first.resized[1] <= 10_000


def test_salts_share_nothing(front: VideoFrontend) -> None:
    one = prepare(front, part(GIF), scope=MediaScope(salt="a"))[0]
    two = prepare(front, part(GIF), scope=MediaScope(salt="b"))[0]
    assert one is not two and front.cache.hits == 0


def test_uuids(front: VideoFrontend) -> None:
    made = prepare(front, part(GIF, uuid="u"))[0]
    assert prepare(front, part(None, uuid="u"))[0] is made
    with pytest.raises(Conflict):
        prepare(front, part(ARRAY, uuid="u"))
    for scope in (MediaScope(tenant="other"), MediaScope(salt="s"), MediaScope(options=MediaOptions(nframes=2))):
        with pytest.raises(BadRequest, match="Cache miss for video at index 0 but data is not provided"):
            prepare(front, part(None, uuid="u"), scope=scope)


def test_pixels_are_charged(front: VideoFrontend) -> None:
    requested: list[int] = []
    made = prepare(front, part(GIF), scope=MediaScope(charge=requested.append))[0]
    assert requested == [made.resized[0] * made.resized[1] * 2 * len(made.patches)]

    def full(pixels: int) -> None:
        raise QueueFull("full", retry_after=1)

    with pytest.raises(QueueFull):
        prepare(front, part(GIF), scope=MediaScope(charge=full))


def test_limits(front: VideoFrontend) -> None:
    cases: list[tuple[list[MediaPart], type[TrencadisError], str, str]] = [
        ([part(GIF)] * 3, BadRequest, "At most 2 video", "video"),
        ([part(np.zeros((9, 8, 8, 3), np.uint8))], TooLarge, "9 frames", PATH),
        ([part(np.zeros((4, 8, 8), np.uint8))], BadRequest, "uint8", PATH),
        ([part([video_clips.png(p) + bytes(1 << 19) for p in video_clips.make_frames(ARRAY)])],
         TooLarge, "bytes in all", PATH),
        ([part(Path("/etc/passwd"))], Forbidden, "not allowed", PATH),
        ([part(video_clips.animation(ARRAY, ms=20_000))], TooLarge, "lasts 100 seconds", PATH),
        ([part(video_clips.animation(video_clips.frames(np.random.default_rng(1), 10, 48, 64)),
               MediaOptions(nframes=10))],
         TooLarge, "10 frames", PATH),
    ]  # fmt: skip
    for parts, error, text, param in cases:
        with pytest.raises(error, match=text) as caught:
            prepare(front, *parts)
        assert caught.value.param == param


def test_the_cache_keeps_to_its_bytes(decoder: ImageDecoder) -> None:
    cache = ProcessorCache(200_000)
    front = VideoFrontend(Qwen2VLImageProcessor(3136, 50176), MediaLoader(), cache, decoder)
    for i in range(8):
        prepare(front, part(np.roll(ARRAY, i, 1)))
        assert cache.bytes <= 200_000
    assert cache.evictions > 0 or len(cache) == 0


class Web(MediaLoader):
    """Answers URLs from a table; a missing one never answers."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        super().__init__()
        self.pages = pages
        self.waiting = 0

    async def load(self, source: str | Path, param: str) -> bytes:
        if str(source) in self.pages:
            return self.pages[str(source)]
        if "refused" in str(source):
            raise Forbidden("no", param=param)
        self.waiting += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.waiting -= 1
        raise AssertionError


def web_front(decoder: ImageDecoder, pages: dict[str, bytes], most: int = 8) -> VideoFrontend:
    return VideoFrontend(
        Qwen2VLImageProcessor(3136, 50176), Web(pages), ProcessorCache(1 << 28), decoder, VideoLimits(frames=most)
    )


def test_a_frame_that_fails_ends_the_downloads_of_the_others(decoder: ImageDecoder) -> None:
    front = web_front(decoder, {})

    async def main() -> int:
        with pytest.raises(Forbidden):
            await front.prepare([part(["http://slow/1", "http://refused/2"])], 1000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting: int = front.loader.waiting  # type: ignore[attr-defined]
        return waiting

    assert asyncio.run(main()) == 0


def test_slow_hosts_hold_up_no_clip_that_is_here(decoder: ImageDecoder) -> None:
    front = web_front(decoder, {"http://quick/": GIF})

    async def main() -> PreparedVideo:
        slow = [asyncio.create_task(front.prepare([part("http://slow/")], 1000)) for _ in range(6)]
        await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(30):
                (made,) = await front.prepare([part(GIF)], 1000)
                await front.prepare([part("http://quick/")], 1000)
                return made
        finally:
            for task in slow:
                task.cancel()

    assert len(asyncio.run(main()).patches) == 2


def test_one_requests_lack_of_room_is_not_anothers(decoder: ImageDecoder) -> None:
    """Equal clips are decoded once, but how much context is left is each request's own."""
    front = web_front(decoder, {})

    async def main() -> list[Any]:
        rooms = (2, 1000, 1000)
        return await asyncio.gather(
            *(front.prepare([part(GIF)], tokens_left) for tokens_left in rooms), return_exceptions=True
        )

    short, long, again = asyncio.run(main())
    assert "2 left" in short.message and short.param == PATH
    assert long[0] is again[0]


def test_frames_at_an_absurd_rate_are_refused(decoder: ImageDecoder) -> None:
    """At 1e-300 frames a second positions were infinite."""
    for fps in (1e-300, 5e-324, 1e-9):
        with pytest.raises(BadRequest, match="seconds"):
            prepare(web_front(decoder, {}), part(ARRAY, MediaOptions(fps=fps)))
    assert prepare(web_front(decoder, {}), part(ARRAY, MediaOptions(fps=0.001)))[0].seconds == 2000


def test_seconds_of_fetching_and_resizing_are_told(decoder: ImageDecoder) -> None:
    front = web_front(decoder, {"http://quick/": GIF})

    async def main() -> MediaTimes:
        with record_media_times() as times:
            await front.prepare([part("http://quick/")], 1000)
        return times

    times = asyncio.run(main())
    assert times.num_prepared == 1 and all(seconds > 0 for seconds in times.seconds.values())
