"""Conversions to upright RGB, and headers of honest files."""

import io
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from trencadis.core.errors import BadRequest
from trencadis.multimodal.images.image_header import Header, inspect_header
from trencadis.multimodal.images.pil_decode import decode, jpeg_shrink, prepare_image, to_rgb
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

rng = np.random.default_rng(5)


def noise(width=37, height=23, channels=3):
    return Image.fromarray(rng.integers(0, 256, (height, width, channels), np.uint8).squeeze())


def encode(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def open_video(data):
    return decode(data, inspect_header(data))


def pixels(image):
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP", "JPEG", "GIF"])
def test_headers_and_pixels_of_the_five_formats(format):
    image = noise()
    data = encode(image, format, **({"lossless": True} if format == "WEBP" else {}))
    assert inspect_header(data) == Header(format, 37, 23, 1)
    want = Image.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(pixels(open_video(data)), np.asarray(want))
    if format in ("PNG", "BMP", "WEBP"):
        assert np.array_equal(pixels(open_video(data)), np.asarray(image))


@pytest.mark.parametrize("options", [{"quality": 80}, {"quality": 80, "exif": Image.Exif()}, {"lossless": True}])
def test_webp_headers(options):
    data = encode(noise(321, 123), "WEBP", **options)
    assert inspect_header(data) == Header("WEBP", 321, 123, 1)
    assert open_video(data).size == (321, 123)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF"])
def test_first_frame_of_an_animation(format):
    red, blue = Image.new("RGB", (20, 10), (250, 0, 0)), Image.new("RGB", (20, 10), (0, 0, 250))
    data = encode(
        red, format, save_all=True, append_images=[blue, red], **({"lossless": True} if format == "WEBP" else {})
    )
    assert inspect_header(data) == Header(format, 20, 10, 2)
    assert np.array_equal(pixels(open_video(data)), np.asarray(red))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation(format, orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise(), format, exif=exif)
    want = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    got = open_video(data)
    assert got.size == ((37, 23) if orientation < 5 else (23, 37))
    assert np.array_equal(pixels(got), want)
    assert np.array_equal(pixels(to_rgb(got)), want)


def test_garbled_exif_costs_nothing():
    data = encode(noise(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    assert open_video(data).size == (37, 23)


def sixteen_bit():
    return Image.fromarray(np.array([[0, 127, 128, 129, 257, 32768, 65279, 65407, 65535]], np.uint16))


def test_sixteen_bit_grey_is_scaled():
    want = [0, 0, 0, 1, 1, 128, 254, 255, 255]
    assert pixels(open_video(encode(sixteen_bit(), "PNG")))[0, :, 0].tolist() == want
    assert pixels(to_rgb(sixteen_bit().convert("I")))[0, :, 1].tolist() == want


def palette(alpha=False):
    image = noise().quantize(16)
    if alpha:
        image.info["transparency"] = bytes(range(0, 256, 16))
    return image


MODES = {
    "L": noise(channels=1), "LA": noise(channels=2), "RGBA": noise(channels=4), "1": noise(channels=1).convert("1"),
    "P": palette(), "P+tRNS": palette(True), "CMYK": noise().convert("CMYK"), "YCbCr": noise().convert("YCbCr"),
    "HSV": noise().convert("HSV"), "RGB": noise(),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_modes_are_converted_as_the_reference_does(name):
    want: Any = convert_to_rgb(MODES[name], return_numpy=True)
    assert np.array_equal(pixels(to_rgb(MODES[name])), want)


@pytest.mark.parametrize("name", ["LA", "RGBA", "P+tRNS", "1", "L"])
def test_modes_survive_a_png(name):
    assert np.array_equal(pixels(open_video(encode(MODES[name], "PNG"))), pixels(to_rgb(MODES[name])))


def test_transparent_is_white():
    clear = Image.new("RGBA", (4, 4), (9, 9, 9, 0))
    assert (pixels(open_video(encode(clear, "PNG"))) == 255).all()
    keyed = encode(Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert (pixels(open_video(keyed)) == 255).all()
    deep = encode(Image.fromarray(np.full((2, 2), 700, np.uint16)), "PNG", transparency=700)
    assert (pixels(open_video(deep)) == 255).all()


def test_cmyk_jpeg():
    data = encode(noise().convert("CMYK"), "JPEG", quality=95)
    want = Image.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(pixels(open_video(data)), np.asarray(want))


def test_a_mode_that_cannot_be_converted_is_refused():
    with pytest.raises(BadRequest, match="colour mode"):
        to_rgb(Image.new("La", (3, 3)))


def test_plain_rgb_is_passed_through_uncopied():
    image = noise()
    assert to_rgb(image) is image


def test_callers_images_are_not_changed():
    image = noise()
    image.info["exif"] = Image.Exif().tobytes()
    image.getexif()[0x0112] = 6
    before = np.asarray(image).copy()
    assert to_rgb(image).size == (23, 37)
    assert np.array_equal(np.asarray(image), before) and "exif" in image.info


@pytest.mark.parametrize(
    ("size", "requested", "shrink"),
    [
        ((1024, 1024), (1036, 1036), 1), ((8000, 6000), (756, 1008), 1), ((8000, 6000), (750, 1000), 2),
        ((8000, 6000), (375, 500), 4), ((6000, 8000), (375, 500), 4), ((8000, 6000), (168, 224), 8),
        ((8000, 6000), (28, 28), 8), ((8000, 40), (28, 560), 1),
    ],
)  # fmt: skip
def test_when_a_jpeg_is_shrunk_while_it_is_decoded(size, requested, shrink):
    assert jpeg_shrink(Header("JPEG", *size), *requested) == shrink
    assert jpeg_shrink(Header("PNG", *size), *requested) == 1


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(("size", "limit", "exact"), [((1023, 701), 63_000, True), ((1023, 701), 11_000, False)])
def test_shrunk_images_have_the_right_size_and_almost_the_right_pixels(orientation, size, limit, exact):
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth = Image.fromarray(rng.integers(0, 256, (9, 13, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    data = encode(smooth, "JPEG", exif=exif, quality=90)
    processor = Qwen2VLImageProcessor(3136, limit)
    values, buffers = prepare_image(bytearray(data), {"max_pixels": 10**8, "processor": asdict(processor)})
    want = processor.prepare(open_video(data), "")
    assert (values["resized"], values["original"]) == (want.resized, want.original)
    got = np.frombuffer(buffers[0], np.uint8).reshape(want.pixels.shape).astype(int)
    differ = np.abs(got - want.pixels)
    assert (differ.max() == 0) == exact and differ.max() <= 10 and differ.mean() < 1
