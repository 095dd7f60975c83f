"""uuids: a client's name for an image, within its tenant and salt; never a way to another image."""

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from tests.traffic.media import prepare_now
from trencadis.core.errors import BadRequest, Conflict
from trencadis.multimodal.images.image_frontend import ImageFrontend
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions, MediaPart, MediaScope
from trencadis.multimodal.media_uuids import UuidRegistry
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader


def png(seed=0, size=(40, 60)):
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def front():
    made = ImageFrontend(Qwen2VLImageProcessor(3136, 1003520), MediaLoader(), ProcessorCache(1 << 24))
    yield made
    made.close()


def part(source, uuid="u", **options):
    return MediaPart(source, "p", MediaOptions(**options), uuid=uuid)


def test_a_name_without_data_finds_the_kept_image(front):
    first = prepare_now(front, [part(png())])[0]
    charged = []
    again = prepare_now(front, [part(None)], MediaScope(charge=charged.append))[0]
    assert again is first and charged == [first.resized[0] * first.resized[1]]
    image = Image.open(io.BytesIO(png(3)))
    assert prepare_now(front, [part(image, "pil"), part(image, "pil")])[1] is prepare_now(front, [part(None, "pil")])[0]


@pytest.mark.parametrize("same_request", [True, False])
def test_other_bytes_under_a_name_are_a_conflict(front, same_request):
    parts = [part(png(0)), part(png(1))]
    with pytest.raises(Conflict) as caught:
        if same_request:
            prepare_now(front, parts)
        else:
            prepare_now(front, parts[:1])
            prepare_now(front, parts[1:])
    assert caught.value.param == "p" and caught.value.status == 409
    assert prepare_now(front, [part(png(1), "v")])[0].digest != prepare_now(front, [part(png(0), "w")])[0].digest


def test_options_are_no_other_image_but_must_be_kept(front):
    data = png(size=(80, 120))
    large, small = prepare_now(front, [part(data), part(data, max_pixels=5000)])
    assert large.resized != small.resized
    assert prepare_now(front, [part(None, max_pixels=5000)])[0] is small
    with pytest.raises(BadRequest, match="Cache miss for image at index 0 but data is not provided"):
        prepare_now(front, [part(None, max_pixels=4000)])
    with pytest.raises(BadRequest, match="Cache miss for image at index 1 but"):
        prepare_now(front, [part(data), part(None, "other")])


@pytest.mark.parametrize(
    "scope", [MediaScope(tenant="b"), MediaScope(salt="s"), MediaScope("s", "b")], ids=["tenant", "salt", "both"]
)
def test_names_belong_to_tenant_and_salt(front, scope):
    prepare_now(front, [part(png(0))])
    with pytest.raises(BadRequest, match="Cache miss for image at index 0 but data is not provided"):
        prepare_now(front, [part(None)], scope)
    other = prepare_now(front, [part(png(1))], scope)[0]
    assert prepare_now(front, [part(None)], scope)[0] is other
    assert prepare_now(front, [part(None)])[0].digest != other.digest


def test_evicted_images_are_missed_and_come_back_with_their_data():
    front = ImageFrontend(Qwen2VLImageProcessor(3136, 1003520), MediaLoader(), ProcessorCache(40_000))
    first = prepare_now(front, [part(png(0))])[0]
    prepare_now(front, [part(png(1), "v")])
    assert front.cache.evictions == 1
    with pytest.raises(BadRequest, match="Cache miss for image at index 0 but data is not provided"):
        prepare_now(front, [part(None)])
    with pytest.raises(Conflict):
        prepare_now(front, [part(png(2))])
    assert np.array_equal(prepare_now(front, [part(png(0))])[0].pixels, first.pixels)
    front.close()


def test_a_damaged_image_gets_no_name(front):
    with pytest.raises(BadRequest):
        prepare_now(front, [part(png()[:60])])
    assert len(front.uuids) == 0 and prepare_now(front, [part(png())])


def test_a_name_whose_image_is_under_way_waits_for_it(front, monkeypatch):
    async def main():
        begun, plain = asyncio.Event(), front.decoder.prepare

        async def slow(*args):
            begun.set()
            await asyncio.sleep(0.02)
            return await plain(*args)

        await front.prepare([part(png())])
        front.cache._images.clear()
        front.cache.bytes = 0
        monkeypatch.setattr(front.decoder, "prepare", slow)
        first = asyncio.create_task(front.prepare([part(png())]))
        await asyncio.wait_for(begun.wait(), 10)
        named = await front.prepare([part(None)])
        return (await first)[0] is named[0]

    assert asyncio.run(main())


def test_the_book_is_bounded_and_keeps_what_is_used():
    registry = UuidRegistry(3)
    for uuid in "abc":
        registry.remember("t", "s", uuid, uuid)
    assert registry.find("t", "s", "a") == "a"
    registry.remember("t", "s", "d", "d")
    assert len(registry) == 3 and registry.find("t", "s", "b") is None and registry.find("t", "s", "a") == "a"


def test_names_do_not_run_together():
    registry = UuidRegistry()
    triples = [("a", "b", "c"), ("ab", "", "c"), ("", "ab", "c"), ("a", "bc", ""), ("a", "1:b", "c"), ("a", "b", "1:c")]
    for i, triple in enumerate(triples):
        registry.remember(*triple, str(i))
    assert [registry.find(*t) for t in triples] == [str(i) for i in range(len(triples))]
