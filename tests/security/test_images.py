"""Hostile bytes: bombs, lies, cuts and foreign formats. Each gets a short typed error, and none costs memory."""

import io
import random
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.hostile.files import bmp, chunk, encoded, gif, jpeg, png, webp_canvas, webp_lossless, webp_lossy
from trencadis.core.errors import TrencadisError
from trencadis.multimodal.images import pil_decode as decode_module
from trencadis.multimodal.images.image_header import MAX_IMAGE_PIXELS, Header, check_size, inspect_header
from trencadis.multimodal.images.pil_decode import decode

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP"]


def open_video(data):
    return decode(data, inspect_header(data))


def refused(data, status):
    with pytest.raises(TrencadisError) as caught:
        open_video(data)
    error = caught.value
    assert error.status == status, error
    assert 0 < len(error.message) < 200
    assert not [w for w in ("PIL", "0x", "BytesIO", "object at", "Error") if w in error.message]
    assert error.__suppress_context__ or error.__context__ is None
    return error.message


@pytest.fixture
def undecoded(monkeypatch):
    """Fails the test where a decoder is reached; afterwards checks that Python took little memory."""

    def fail(*_, **__):
        pytest.fail("decoded")

    monkeypatch.setattr(Image, "open", fail)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


SIZED = {
    "PNG": png, "JPEG": jpeg, "GIF": gif, "WebP canvas": webp_canvas, "WebP lossy": webp_lossy,
    "WebP lossless": webp_lossless, "BMP": bmp,
}  # fmt: skip
LONGEST = {"WebP lossy": 16383, "WebP lossless": 16384}


@pytest.mark.parametrize("maker", SIZED)
def test_bombs_are_refused_by_their_header(maker, undecoded):
    side = LONGEST.get(maker, 65535)
    refused(SIZED[maker](side, side), 413)
    with pytest.raises(TrencadisError) as caught:
        inspect_header(SIZED[maker](100, 100), max_pixels=9999)
    assert caught.value.status == 413


@pytest.mark.parametrize("maker", SIZED)
@pytest.mark.parametrize("swap", [False, True])
def test_endless_strips_are_refused(maker, swap, undecoded):
    sides = (LONGEST.get(maker, 65535), 1)
    refused(SIZED[maker](*(sides[::-1] if swap else sides)), 400)


@pytest.mark.parametrize("maker", ["PNG", "JPEG", "WebP lossy", "BMP"])
@pytest.mark.parametrize("size", [(0, 0), (0, 10), (10, 0)])
def test_empty_images_are_refused(maker, size, undecoded):
    refused(SIZED[maker](*size), 400)


@pytest.mark.parametrize(("width", "height"), [(2**31, 2**31 - 1), (2**32 - 1, 2**32 - 1), (1 << 24, 1 << 24)])
def test_absurd_sides_are_refused(width, height, undecoded):
    refused(png(width, height), 400)


def test_negative_widths_and_extreme_heights_of_bmp(undecoded):
    refused(bmp(-64, 48), 400)
    refused(bmp(64, -(2**31)), 400)


def test_bmp_from_the_top_down_is_accepted():
    data = bmp(64, -48)
    assert inspect_header(data) == Header("BMP", 64, 48)
    upward = np.asarray(open_video(bmp(64, 48)))
    assert np.array_equal(np.asarray(open_video(data)), upward[::-1])


def test_limit_of_pixels_is_exact():
    assert MAX_IMAGE_PIXELS == 178956970
    check_size(178956970 // 2000, 2000, MAX_IMAGE_PIXELS)
    with pytest.raises(TrencadisError) as caught:
        inspect_header(png(178956970 // 2000 + 1, 2000))
    assert caught.value.status == 413
    assert inspect_header(png(10, 10), 100) == Header("PNG", 10, 10)
    with pytest.raises(TrencadisError):
        inspect_header(png(10, 10), 99)


@pytest.mark.parametrize("frame", [(0, 0, 65535, 65535), (65000, 65000, 64, 48)])
def test_gif_frames_that_leave_the_canvas(frame, undecoded):
    refused(gif(64, 48, frame), 413)


def test_gif_frame_a_little_larger_than_the_canvas_is_not_a_lie():
    assert inspect_header(gif(10, 10)) == Header("GIF", 64, 48)
    assert open_video(gif(10, 10)).size == (64, 48)


FRAME = b"\xff\xc0\0\x11\x08\0\x10\0\x10\3\1\x22\0\2\x11\1\3\x11\1"
LIES = {
    "PNG too tall": png(20, 200),
    "PNG empty data": png(20, 20, body=b""),
    "PNG wrong checksum": bytearray(encoded("PNG")),
    "JPEG two sizes": encoded("JPEG").replace(b"\xff\xc0", FRAME + b"\xff\xc0", 1),
    "WebP canvas": webp_canvas(80, 80),
    "WebP lossless": webp_lossless(800, 800),
    "BMP": bmp(640, 480),
    "GIF": gif(640, 480, (0, 0, 640, 480)),
}  # fmt: skip
LIES["PNG wrong checksum"][30] ^= 1


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(name):
    refused(bytes(LIES[name]), 400)


def test_a_jpeg_that_ends_properly_but_early_is_flat_below():
    rows = np.asarray(open_video(jpeg(64, 4800)))
    assert rows.shape == (4800, 64, 3) and (rows[200:] == rows[-1]).all()


def test_a_decoder_that_sees_another_size_is_not_believed():
    with pytest.raises(TrencadisError) as caught:
        decode(encoded("PNG"), Header("PNG", 10, 10))
    assert caught.value.status == 400


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_files(format):
    data = encoded(format)
    for share in (0.05, 0.3, 0.5, 0.8, 0.95):
        refused(data[: int(len(data) * share)], 400)
    for size in (14, 18, 25, 27):
        refused(data[:size], 400)


FOREIGN = {
    "tiff": b"II*\0" + bytes(60), "tiff big": b"MM\0*" + bytes(60), "eps": b"%!PS-Adobe-3.0",
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "pdf": b"%PDF-1.7\n" + encoded("JPEG"),
    "html": b"<html><img src=x></html>", "psd": b"8BPS\0\1" + bytes(40), "ico": b"\0\0\1\0\1\0" + bytes(40),
    "avif": b"\0\0\0\x1cftypavif" + bytes(40), "zip": b"PK\3\4" + bytes(40), "ppm": b"P6 4 4 255\n" + bytes(48),
    "avi": b"RIFF\x24\0\0\0AVI " + bytes(40), "webp behind a space": b" " + encoded("WEBP"), "zeros": bytes(100),
    "png without its first byte": encoded("PNG")[1:], "soi alone": b"\xff\xd8", "gif 88": b"GIF88a" + bytes(40),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_refused(name, undecoded):
    refused(FOREIGN[name], 415)


POLYGLOTS = {
    "script in GIF": b"GIF89a/*" + b"*/=1;alert(1)//" + bytes(20),
    "PNG in BMP": b"BM" + encoded("PNG"),
    "JPEG marker and PNG": b"\xff\xd8\xff" + encoded("PNG"),
    "PNG signature and JPEG": b"\x89PNG\r\n\x1a\n" + encoded("JPEG"),
    "WebP with GIF": b"RIFF\x24\0\0\0WEBP" + encoded("GIF"),
    "JPEG without a frame": b"\xff\xd8\xff\xda\0\2" + bytes(50),
}


@pytest.mark.parametrize("name", POLYGLOTS)
def test_polyglots(name):
    refused(POLYGLOTS[name], 400)


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_behind_an_image_change_nothing(format):
    data = encoded(format)
    tail = b"PK\3\4<script>" + encoded("PNG" if format != "PNG" else "GIF")
    assert np.array_equal(np.asarray(open_video(data + tail)), np.asarray(open_video(data)))


def test_only_the_plugin_of_the_header_is_tried(monkeypatch):
    seen = []
    plain = Image.open

    def spy(*args, **kwargs):
        seen.append(kwargs["formats"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(Image, "open", spy)
    for format in FORMATS:
        open_video(encoded(format))
    assert seen == [(f,) for f in FORMATS]


def text(kind, size):
    packed = zlib.compress(bytes(size), 9)
    return chunk(kind, b"k\0\0" + packed) if kind == b"zTXt" else chunk(kind, b"k\0\1\0\0\0" + packed)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
def test_text_bombs_of_png(kind, undecoded):
    assert refused(png(20, 20, *[text(kind, 1 << 20)] * 17), 400) == "The image carries too much text."
    refused(png(20, 20, *[chunk(b"tEXt", b"k\0v")] * 65), 400)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
def test_one_huge_text_of_png_stays_packed(kind):
    data = png(4, 4, text(kind, 64 << 20), body=bytes(4 * 13))
    tracemalloc.start()
    refused(data, 400)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_much_text_that_is_honest_is_accepted():
    data = png(4, 4, chunk(b"tEXt", b"workflow\0" + b"x" * 900_000), text(b"iTXt", 5000), body=bytes(4 * 13))
    assert open_video(data).size == (4, 4)


def test_jpegs_of_endless_scans(undecoded):
    data = encoded("JPEG", progressive=True)
    assert inspect_header(data).format == "JPEG"
    refused(data[:-2] + b"\xff\xda\0\x08\1\1\0\0\x3f\0\0" * 100 + data[-2:], 400)


@pytest.mark.parametrize("failure", [MemoryError, Image.DecompressionBombError("178956971 pixels")])
def test_memory_that_runs_out_is_too_large(monkeypatch, failure):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(decode_module, "to_rgb", fail)
    refused(encoded("PNG"), 413)


def test_pillows_own_limit_stays_on(monkeypatch):
    assert Image.MAX_IMAGE_PIXELS is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    refused(encoded("PNG"), 413)


def test_one_pixel():
    for format in FORMATS:
        assert open_video(encoded(format, 1, 1)).size == (1, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_damage_anywhere_gives_an_image_or_a_short_error(format):
    rng = random.Random(format)
    whole = encoded(format)
    kept = 0
    for _ in range(150):
        data = bytearray(whole[: rng.randint(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(min(len(data), rng.choice([40, 200, 1 << 30])))] = rng.randrange(256)
        try:
            assert decode(bytes(data), inspect_header(bytes(data), 1 << 20)).mode == "RGB"
            kept += 1
        except TrencadisError as error:
            assert error.status in (400, 413, 415) and len(error.message) < 200
            assert "0x" not in error.message and "PIL" not in error.message
    assert kept < 150


def test_flat_images_may_be_small_and_large_ones_must_not():
    flat = Image.new("L", (4000, 4000), "white")
    for format in ("PNG", "GIF", "JPEG"):
        out = io.BytesIO()
        flat.save(out, format)
        assert inspect_header(out.getvalue()).width == 4000
    page = Image.new("1", (4960, 7016), 1)
    page.paste(Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300), np.uint8)).convert("1"), (50, 50))
    out = io.BytesIO()
    page.save(out, "PNG", optimize=True)
    assert inspect_header(out.getvalue()).depth == 1, "a scanned page is no bomb"


@pytest.mark.parametrize(("format", "mode"), [("PNG", "RGB"), ("PNG", "L"), ("GIF", "L"), ("WEBP", "RGB")])
def test_bombs_below_the_limit_of_pixels(format, mode, request):
    out = io.BytesIO()
    options = {"lossless": True} if format == "WEBP" else {}
    Image.new(mode, (6001, 6001), 7 if mode == "L" else "black").save(out, format, **options)
    request.getfixturevalue("undecoded")
    assert "in a file of" in refused(out.getvalue(), 413)


def test_a_png_of_more_pixels_than_deflate_can_hold_is_not_decoded(undecoded):
    refused(png(4000, 4000, body=bytes(5000)), 400)


ENDLESS = {
    "PNG of empty chunks": png(20, 20, chunk(b"juNk") * 140_000),
    "JPEG of fill bytes": b"\xff\xd8" + b"\xff" * 5_000_000 + b"\xc0\0\x11\x08\0\x10\0\x10\3" + bytes(40),
    "JPEG of empty segments": b"\xff\xd8" + b"\xff\xe0\0\2" * 1_000_000,
    "GIF of short comments": b"GIF89a\x10\0\x10\0\0\0\0" + b"!\xfe\1x\0" * 1_000_000,
    "GIF of empty extensions": b"GIF89a\x10\0\x10\0\0\0\0" + b"!\xfe\0" * 1_000_000,
    "GIF of short blocks": b"GIF89a\x10\0\x10\0\0\0\0!\xfe" + b"\1x" * 1_000_000,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_files_of_many_small_parts_are_not_walked_through(name):
    start = time.perf_counter()
    refused(ENDLESS[name], 400)
    assert time.perf_counter() - start < 2.5
