"""Files that lie, explode or never end; small themselves."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encoded(format, width=64, height=48, **options):
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, format, **options)
    return out.getvalue()


def chunk(kind, body=b""):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, *extra, body=b"\0" * 50, depth=8, colour=2):
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", head), *extra, chunk(b"IDAT", zlib.compress(body)), chunk(b"IEND")]
    )


def packed_text(size):
    return chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(size), 9))


def jpeg(width, height):
    data = bytearray(encoded("JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def gif(width, height, frame=None):
    data = bytearray(encoded("GIF"))
    struct.pack_into("<HH", data, 6, width, height)
    if frame:
        header = 13 + (3 << ((data[10] & 7) + 1))
        assert data[header] == 0x2C
        struct.pack_into("<HHHH", data, header + 1, *frame)
    return bytes(data)


def webp_canvas(width, height):
    body = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (width - 1).to_bytes(3, "little")
    body += (height - 1).to_bytes(3, "little") + encoded("WEBP", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def webp_lossy(width, height):
    data = bytearray(encoded("WEBP"))
    struct.pack_into("<HH", data, 26, width, height)
    return bytes(data)


def webp_lossless(width, height):
    data = bytearray(encoded("WEBP", lossless=True))
    struct.pack_into("<I", data, 21, (width - 1) | (height - 1) << 14)
    return bytes(data)


def bmp(width, height):
    data = bytearray(encoded("BMP"))
    struct.pack_into("<ii", data, 18, width, height)
    return bytes(data)


def flat(format, side, mode="L", **options):
    out = io.BytesIO()
    Image.new(mode, (side, side), 7).save(out, format, **options)
    return out.getvalue()


def scans():
    data = encoded("JPEG", progressive=True)
    return data[:-2] + b"\xff\xda\0\x08\1\1\0\0\x3f\0\0" * 100 + data[-2:]


def gif_of_frames(count):
    out = io.BytesIO()
    frames = [Image.new("L", (8, 8), i % 256) for i in range(count)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


FRAME = b"\xff\xc0\0\x11\x08\0\x10\0\x10\3\1\x22\0\2\x11\1\3\x11\1"
BROKEN_SUM = bytearray(encoded("PNG"))
BROKEN_SUM[30] ^= 1

BOMBS = {
    "PNG of 65535 squared": (png(65535, 65535), 413),
    "PNG of 2^31 squared": (png(2**31 - 1, 2**31 - 1), 400),
    "flat PNG below the limit of pixels": (flat("PNG", 4500), 413),
    "flat bilevel PNG": (flat("PNG", 12000, "1"), 413),
    "flat WebP below the limit of pixels": (flat("WEBP", 4500, "RGB", lossless=True, method=0), 413),
    "flat GIF below the limit of pixels": (flat("GIF", 4500), 413),
    "PNG of packed texts": (png(20, 20, *[packed_text(1 << 20)] * 17), 400),
    "PNG of one packed text of 64 MB": (png(4, 4, packed_text(64 << 20), body=bytes(4 * 13)), 400),
    "PNG of a packed colour profile": (
        png(20, 20, chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(64 << 20), 9)), body=bytes(20 * 61)), 400),
    "PNG with a stream inside the stream": (png(2000, 2000, body=zlib.compress(bytes(12_002_000))), 400),
    "PNG of empty chunks": (png(20, 20, chunk(b"juNk") * 140_000), 400),
    "WebP canvas of 2^24": (webp_canvas(1 << 24, 1 << 24), 400),
    "WebP canvas of 60000": (webp_canvas(60000, 60000), 413),
    "WebP lossy of 16383": (webp_lossy(16383, 16383), 413),
    "WebP lossless of 16384": (webp_lossless(16384, 16384), 413),
    "GIF canvas of 65535": (gif(65535, 65535), 413),
    "GIF frame of 65535": (gif(64, 48, (0, 0, 65535, 65535)), 413),
    "GIF of short comments": (b"GIF89a\x10\0\x10\0\0\0\0" + b"!\xfe\1x\0" * 300_000, 400),
    "JPEG of 65535 squared": (jpeg(65535, 65535), 413),
    "JPEG of 12000 squared in 5 kB": (jpeg(12000, 12000), 413),
    "JPEG of endless scans": (scans(), 400),
    "JPEG of fill bytes": (b"\xff\xd8" + b"\xff" * 1_000_000 + b"\xc0" + bytes(40), 400),
    "BMP of 65535 squared": (bmp(65535, 65535), 413),
    "BMP of a negative width": (bmp(-64, 48), 400),
}  # fmt: skip
LIES = {
    "PNG taller than its data": (png(20, 200), 400),
    "PNG without data": (png(20, 20, body=b""), 400),
    "PNG with a wrong checksum": (bytes(BROKEN_SUM), 400),
    "PNG of 4000 squared in 50 bytes": (png(4000, 4000), 400),
    "JPEG of two sizes": (encoded("JPEG").replace(b"\xff\xc0", FRAME + b"\xff\xc0", 1), 400),
    "WebP canvas larger than its frame": (webp_canvas(80, 80), 400),
    "WebP lossless larger than its data": (webp_lossless(800, 800), 400),
    "BMP larger than its data": (bmp(640, 480), 400),
    "cut off JPEG": (encoded("JPEG")[:500], 400),
    "cut off WebP": (encoded("WEBP")[:500], 400),
    "empty file": (b"", 400),
}
SIZES = {
    "PNG of 65535 x 1": (png(65535, 1), 400),
    "PNG of 1 x 65535": (png(1, 65535), 400),
    "PNG of 0 x 0": (png(0, 0), 400),
    "JPEG of 0 x 10": (jpeg(0, 10), 400),
    "GIF of 65535 x 1": (gif(65535, 1, (0, 0, 65535, 1)), 400),
}
POLYGLOTS = {
    "script in GIF": (b"GIF89a/*" + b"*/=1;alert(1)//" + bytes(20), 400),
    "PNG in BMP": (b"BM" + encoded("PNG"), 400),
    "JPEG marker and PNG": (b"\xff\xd8\xff" + encoded("PNG"), 400),
    "PNG signature and JPEG": (b"\x89PNG\r\n\x1a\n" + encoded("JPEG"), 400),
    "WebP with GIF": (b"RIFF\x24\0\0\0WEBP" + encoded("GIF"), 400),
    "PDF with JPEG": (b"%PDF-1.7\n" + encoded("JPEG"), 415),
    "PostScript": (b"%!PS-Adobe-3.0\n(/etc/passwd) (r) file", 415),
    "SVG that includes a file": (b"<svg><image href='file:///etc/passwd'/></svg>", 415),
    "TIFF": (b"II*\0" + bytes(60), 415),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), 415),
    "AVIF": (b"\0\0\0\x1cftypavif" + bytes(40), 415),
    "zip of images": (b"PK\3\4" + encoded("PNG"), 415),
    "gzip of an image": (b"\x1f\x8b\x08\0" + encoded("PNG"), 415),
}
