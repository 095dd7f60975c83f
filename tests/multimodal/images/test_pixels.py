"""What files of every kind become: pixel values bit for bit those of transformers' PIL processor, which is given the
image as our conversion documents it (upright; transparency on white; 16 bits scaled to 8; first frame; RGB)."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.traffic.media import prepare_now
from trencadis.multimodal.images.image_frontend import ImageFrontend
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader

LIMITS = (3136, 200_704)
CHANNEL = np.arange(1176) // (2 * 14 * 14)
rng = np.random.default_rng(8)


def smooth(channels=3, size=(150, 210), dtype=np.uint8):
    """Smooth noise, so that JPEG and palettes change little and a wrong orientation shows."""
    small = rng.integers(0, 256, (12, 9, channels), np.uint8)
    layers = [Image.fromarray(small[:, :, c]).resize(size[::-1], Image.Resampling.BICUBIC) for c in range(channels)]
    return Image.merge({1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels], layers)


def saved(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def turned(tag):
    exif = Image.Exif()
    exif[0x0112] = tag
    return exif


def on_white(image):
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def plain(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def white(data):
    return on_white(Image.open(io.BytesIO(data)))


def upright(data):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def deep(data):
    values = np.asarray(Image.open(io.BytesIO(data))).astype(np.float64)
    return Image.fromarray(np.floor(values / 257 + 0.5).astype(np.uint8)).convert("RGB")


SIXTEEN = Image.fromarray((np.arange(150)[:, None] * 300 + np.arange(210)[None] * 97).astype(np.uint16))
PALETTE = smooth().quantize(64)
CASES = {
    "jpeg": (saved(smooth(), "JPEG", quality=90), plain),
    "progressive grey jpeg": (saved(smooth(1), "JPEG", progressive=True), plain),
    **{f"exif {tag}": (saved(smooth(), "JPEG", exif=turned(tag)), upright) for tag in range(2, 9)},
    "exif png": (saved(smooth(4), "PNG", exif=turned(6)), lambda d: on_white(ImageOps.exif_transpose(
        Image.open(io.BytesIO(d))))),
    "rgba png": (saved(smooth(4), "PNG"), white),
    "grey alpha png": (saved(smooth(2), "PNG"), white),
    "rgba webp": (saved(smooth(4), "WEBP", lossless=True), white),
    "palette png": (saved(PALETTE, "PNG"), plain),
    "palette with transparency": (saved(PALETTE, "PNG", transparency=bytes(range(0, 256, 4))), white),
    "one transparent colour": (saved(PALETTE, "GIF", transparency=3), white),
    "16-bit png": (saved(SIXTEEN, "PNG"), deep),
    "1-bit png": (saved(smooth(1).convert("1"), "PNG"), plain),
    "cmyk jpeg": (saved(smooth().convert("CMYK"), "JPEG", quality=92), plain),
    "bmp": (saved(smooth(), "BMP"), plain),
    **{f"animated {f}": (saved(smooth(), f, save_all=True, append_images=[smooth(), smooth()]), plain)
       for f in ("GIF", "PNG", "WEBP")},
}  # fmt: skip


@pytest.fixture(scope="module")
def front():
    made = ImageFrontend(Qwen2VLImageProcessor(*LIMITS), MediaLoader(), ProcessorCache(0))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference():
    return Qwen2VLImageProcessorPil(size={"shortest_edge": LIMITS[0], "longest_edge": LIMITS[1]})


def check(got, image, processor, reference):
    want = reference(image, return_tensors="np")
    assert got.pixels.dtype == np.uint8 and list(got.grid) == want["image_grid_thw"][0].tolist()
    assert got.original == (image.height, image.width)
    assert np.array_equal(processor.normalised_values[CHANNEL[None], got.pixels], want["pixel_values"])


def test_every_kind_of_file(front, reference):
    got = prepare_now(front, [(data, name) for name, (data, _) in CASES.items()])
    for made, (name, (data, convert)) in zip(got, CASES.items(), strict=True):
        try:
            check(made, convert(data), front.processor, reference)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16", "I", "YCbCr", "RGB"])
def test_every_mode_of_a_callers_image(mode, front, reference):
    image = SIXTEEN if mode.startswith("I") else smooth(4 if "A" in mode else 3)
    image = image if mode in ("I;16", "RGBA") else image.convert(mode)
    if mode.startswith("I"):
        want = deep(saved(SIXTEEN, "PNG"))
    else:
        want = on_white(image) if "A" in mode else image.convert("RGB")
    before = np.asarray(image).copy()
    check(prepare_now(front, [(image, mode)])[0], want, front.processor, reference)
    assert np.array_equal(np.asarray(image), before), "the caller's image was changed"


def test_16_bit_colour_loses_its_low_bytes(front, reference):
    """Pillow itself reads 16-bit RGB files as 8 bits; the image is the upper bytes."""
    import struct
    import zlib

    values = (np.arange(60)[:, None, None] * 700 + np.arange(90)[None, :, None] * 300 + np.arange(3) * 99) % 65536
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values.astype(np.uint16))

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 90, 60, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    check(
        prepare_now(front, [(data, "")])[0], Image.fromarray((values >> 8).astype(np.uint8)), front.processor, reference
    )
