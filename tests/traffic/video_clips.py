"""Clips for tests: frames, GIF and WebP files, and video files where PyAV is there."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image


def frames(rng: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
    """uint8 [count, height, width, 3]: smooth noise that drifts, and a brightness that tells frames apart."""
    small = rng.integers(0, 200, (max(2, height // 20), max(2, width // 20), 3), dtype=np.uint8)
    base = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    return np.stack([np.roll(base, 3 * i, axis=1) // 2 + np.uint8(i * 97 % 128) for i in range(count)])


def make_frames(array: np.ndarray) -> list[Image.Image]:
    """The frames as PIL images."""
    return [Image.fromarray(f) for f in array]


def animation(array: np.ndarray, format: str = "GIF", ms: int | list[int] = 100) -> bytes:
    """A looping GIF or a lossless WebP."""
    out = BytesIO()
    first, *rest = make_frames(array)
    more: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    first.save(out, format, save_all=True, append_images=rest, duration=ms, loop=0, **more)
    return out.getvalue()


def png(image: Image.Image) -> bytes:
    """A PNG file."""
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def film(array: np.ndarray, format: str = "mp4", codec: str = "libx264", rate: int = 25, **options: Any) -> bytes:
    """A video file; skips the test where PyAV or the encoder is missing."""
    av = pytest.importorskip("av", reason="PyAV is not installed (pip install 'trencadis[video]')")
    try:
        av.Codec(codec, "w")
    except Exception:
        pytest.skip(f"this PyAV has no encoder {codec}")
    out = BytesIO()
    with av.open(out, "w", format=format) as file:
        stream = file.add_stream(codec, rate=rate, options={k: str(v) for k, v in options.items()})
        stream.height, stream.width = array.shape[1:3]
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for one_image in array:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(one_image, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()
