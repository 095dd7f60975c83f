"""The frontend: any source, any order, errors with their path, the loop stays free."""

import asyncio
import base64
import io
import time

import numpy as np
import pytest
from PIL import Image

from tests.traffic.media import prepare_now
from trencadis.core.errors import BadRequest, TooLarge, UnsupportedMedia
from trencadis.multimodal import media_timing_and_concurrency
from trencadis.multimodal.images.image_frontend import ImageFrontend, ImageLimits
from trencadis.multimodal.images.image_header import Header
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaScope
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader


def noise(width=60, height=40, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def make():
    made = []

    def build(cache=1 << 26, **limits):
        front = ImageFrontend(
            Qwen2VLImageProcessor(3136, 1003520), MediaLoader(), ProcessorCache(cache), ImageLimits(**limits)
        )
        made.append(front)
        return front

    yield build
    for front in made:
        front.close()


def test_every_kind_of_source_gives_the_same_pixels_in_order(make):
    front = make()
    first, second = noise(seed=1), noise(90, 30, seed=2)
    sources = [data_url(png(first)), png(second), first, second, png(first)]
    got = prepare_now(front, [(s, f"p[{i}]") for i, s in enumerate(sources)])
    want = [front.processor.prepare(i, "") for i in (first, second)]
    for image, index in zip(got, (0, 1, 0, 1, 0), strict=True):
        assert np.array_equal(image.pixels, want[index].pixels) and image.grid == want[index].grid
    assert got[0].digest == got[4].digest
    assert len({p.digest for p in got}) == 4
    assert all(len(p.digest) == 64 for p in got)


def test_equal_bytes_are_decoded_once_and_cached_by_salt(make, monkeypatch):
    front, opened = make(), []
    plain = front.decoder.prepare
    monkeypatch.setattr(front.decoder, "prepare", lambda *args: opened.append(1) or plain(*args))
    url = data_url(png(noise()))
    prepare_now(front, [(url, "a")] * 5)
    prepare_now(front, [(url, "b")])
    assert len(opened) == 1
    prepare_now(front, [(url, "c")], MediaScope(salt="other"))
    assert len(opened) == 2


def test_digest_depends_on_bytes_shape_and_options(make):
    front = make()
    flat = Image.new("RGB", (40, 60))
    turned = Image.new("RGB", (60, 40))
    a, b, c = prepare_now(front, [(flat, ""), (turned, ""), (png(flat), "")])
    other = ImageFrontend(Qwen2VLImageProcessor(3136, 50176), front.loader, front.cache)
    d = prepare_now(other, [(flat, "")])[0]
    assert len({a.digest, b.digest, c.digest, d.digest}) == 4
    other.decoder.close()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (b"GIF89a", BadRequest),
        (b"", BadRequest),
        (b"no image at all", UnsupportedMedia),
        ("ftp://host/a.png", BadRequest),
        ("", BadRequest),
        ("data:image/png;base64,$$$$", BadRequest),
        (Image.new("L", (300, 300)), TooLarge),
        (Image.new("RGB", (201, 1)), BadRequest),
    ],
    ids=["cut GIF", "empty", "text", "ftp", "no address", "base64", "pixels", "aspect"],
)
def test_errors_name_their_part(make, source, error):
    front = make(max_pixels=80_000)
    path = "messages[0].content[1]"
    with pytest.raises(error) as caught:
        prepare_now(front, [(noise(), "messages[0].content[0]"), (source, path)])
    assert type(caught.value) is error and caught.value.param == path and len(caught.value.message) < 200


def test_equal_wrong_images_each_name_their_own_part(make):
    front = make()

    async def both():
        one = front.prepare([(b"GIF89a-damaged", "a")])
        two = front.prepare([(b"GIF89a-damaged", "b")])
        return await asyncio.gather(one, two, return_exceptions=True)

    assert [e.param for e in asyncio.run(both())] == ["a", "b"]


def test_lazily_opened_images(make, tmp_path):
    front = make(cache=0, threads=4)
    (tmp_path / "a.png").write_bytes(png(noise(900, 700)))
    lazy = Image.open(tmp_path / "a.png")
    got = prepare_now(front, [(lazy, "")] * 8)
    want = front.processor.prepare(noise(900, 700), "").pixels
    assert all(np.array_equal(p.pixels, want) for p in got)
    (tmp_path / "b.png").write_bytes(png(noise(900, 700))[:5000])
    with pytest.raises(BadRequest, match="truncated"):
        prepare_now(front, [(Image.open(tmp_path / "b.png"), "")])


def test_images_under_way_are_bounded(make, monkeypatch):
    front = make(concurrent=3)
    now = most = 0

    async def slow(source, param):
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        return png(noise())

    monkeypatch.setattr(front.loader, "load", slow)
    prepare_now(front, [("data:x", "")] * 10)
    assert most == 3


def test_count_limit(make):
    front = make(images=2)
    assert len(prepare_now(front, [(noise(), "a")] * 2)) == 2
    with pytest.raises(BadRequest) as caught:
        prepare_now(front, [(noise(), "a")] * 3)
    assert caught.value.message == "At most 2 image(s) may be provided in one prompt."
    assert caught.value.param == "image"


def test_decoding_is_in_workers_that_are_bounded(make, monkeypatch):
    front = make(cache=0, threads=2)
    sources = [(png(noise(seed=i)), "") for i in range(8)]
    got = asyncio.run(front.prepare(sources))
    want = [front.processor.prepare(noise(seed=i), "") for i in range(8)]
    assert all(np.array_equal(g.pixels, w.pixels) for g, w in zip(got, want, strict=True))
    assert 1 <= front.decoder.pool.started <= 2


def test_works_inside_a_running_loop_and_across_loops(make):
    front = make()

    async def main():
        return prepare_now(front, [(noise(), "a")])[0].digest

    assert asyncio.run(main()) == asyncio.run(main()) == prepare_now(front, [(noise(), "a")])[0].digest


def test_slow_hosts_hold_up_nobody_else(make, monkeypatch):
    front = make(concurrent=2, downloads=3)
    now, seen = 0, []

    async def load(source, param):
        nonlocal now
        if source.startswith("data:"):
            return png(noise())
        now += 1
        seen.append(now)
        try:
            await asyncio.sleep(60)
        finally:
            now -= 1

    monkeypatch.setattr(front.loader, "load", load)

    async def main():
        slow = asyncio.ensure_future(front.prepare([("http://slow.example/", "")] * 10))
        await asyncio.sleep(0.05)
        made = await asyncio.wait_for(front.prepare([("data:x", "")] * 4), 20)
        slow.cancel()
        await asyncio.wait([slow])
        return len(made)

    assert asyncio.run(main()) == 4 and max(seen) == 3 and now == 0


@pytest.mark.parametrize("status", ["head", "body"])
def test_a_cancelled_request_closes_its_connection(status):
    front = ImageFrontend(
        Qwen2VLImageProcessor(3136, 1003520), MediaLoader(["127.0.0.1"], timeout=60), ProcessorCache(0), ImageLimits()
    )

    async def main():
        closed = asyncio.Event()

        async def serve(reader, writer):
            if status == "body":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n\x89")
            await reader.readuntil(b"\r\n\r\n")
            requested.set()
            assert await reader.read(1) == b""
            closed.set()
            writer.close()

        requested = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        task = asyncio.ensure_future(front.prepare([(url, "")]))
        await asyncio.wait_for(requested.wait(), 10)
        await asyncio.sleep(0.05)
        start = time.monotonic()
        task.cancel()
        await asyncio.wait_for(closed.wait(), 10)
        server.close()
        return time.monotonic() - start

    assert asyncio.run(main()) < 0.5
    front.close()


def test_loops_that_have_ended_are_forgotten(make):
    front = make()
    for seed in range(5):
        prepare_now(front, [(noise(seed=seed), "a")])
    assert len(front._permits._preparations._semaphores) == 1


def test_stages_are_timed_for_the_request_that_caused_them(make):
    front = make()
    url = data_url(png(noise(500, 400)))

    async def prepare(*sources):
        with media_timing_and_concurrency.record_media_times() as times:
            await front.prepare([(s, "p") for s in sources])
        return times

    async def both():
        return await asyncio.gather(prepare(url, noise(seed=3)), prepare(url))

    first, waited = asyncio.run(both())
    assert sorted((first.num_prepared, waited.num_prepared)) in ([0, 2], [1, 1])
    assert first.seconds["resize"] > 0 and first.seconds["fetch"] > 0
    again = asyncio.run(prepare(url))
    assert again.num_prepared == 0 and again.seconds["decode"] == again.seconds["resize"] == 0 < again.seconds["fetch"]


@pytest.mark.parametrize(("said", "resize"), [(0.5, 0.5), (9, 2), (-1, 0), (float("nan"), 0), ("x", 0), (None, 0)])
def test_what_a_worker_says_about_time_is_bounded(said, resize):
    with media_timing_and_concurrency.record_media_times() as times:
        media_timing_and_concurrency.record_prepared(2.0, said)
    assert times.seconds == {"fetch": 0, "decode": 2 - resize, "resize": resize} and times.num_prepared == 1


def test_a_download_is_announced_before_it_begins(make):
    """Requests that take turns give their place to another meanwhile."""
    front = make()
    seen = []

    async def load(source, param):
        seen.append(source[:5])
        return png(noise(seed=8))

    front.loader.load = load
    scope = MediaScope(on_fetch=lambda: seen.append("told"))
    asyncio.run(front.prepare([("data:x", "p")], scope))
    assert seen == ["data:"]
    asyncio.run(front.prepare([("http://host.example/", "p")], scope))
    assert seen == ["data:", "told", "http:"]


def test_a_download_is_timed_as_fetching(make):
    front = make()

    async def load(source, param):
        await asyncio.sleep(0.02)
        return png(noise(seed=7))

    front.loader.load = load

    async def prepare():
        with media_timing_and_concurrency.record_media_times() as times:
            await front.prepare([("http://host.example/", "p")])
        return times

    assert asyncio.run(prepare()).seconds["fetch"] >= 0.02


def test_what_a_job_is_granted_follows_its_own_size(make):
    """By the largest image there may be, five small ones would have taken the whole budget of eight workers."""
    front = make()
    front.processor = Qwen2VLImageProcessor(3136, 12_845_056)
    job = front.decoder.job(Header("JPEG", 1024, 1024), 200_000, front.processor)
    assert 8 * job.memory <= front.decoder.pool.budget
