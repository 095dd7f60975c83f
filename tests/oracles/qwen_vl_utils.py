"""qwen-vl-utils and transformers' video processor as oracles, without torchvision and without a video file.

Where torchvision is not installed, its one function that both need, an antialiased bicubic resize of uint8 frames, is
stood in for by the torch call that torchvision makes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


class InterpolationMode(Enum):
    """torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(video: torch.Tensor, size: list[int], interpolation: Any = None, antialias: bool = True) -> torch.Tensor:
    """uint8 [n, 3, h, w] resized; torchvision leaves equal sizes alone."""
    if list(video.shape[-2:]) == list(size):
        return video
    out = torch.nn.functional.interpolate(
        video.float(), size=list(size), mode="bicubic", antialias=True, align_corners=False
    )
    return out.clamp(0, 255).round().to(torch.uint8)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """``torchvision`` and ``requests`` for the length of an import, where they are missing."""
    functional = SimpleNamespace(resize=resize)
    entries: dict[str, dict[str, Any]] = {
        "requests": {},
        "torchvision": {"__version__": "0.0.0"},
        "torchvision.io": {},
        "torchvision.transforms": {"functional": functional, "InterpolationMode": InterpolationMode},
    }
    missing = {root for root in ("requests", "torchvision") if importlib.util.find_spec(root) is None}
    placed = [name for name in entries if name.partition(".")[0] in missing]
    for name in placed:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(entries[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in placed:
            del sys.modules[name]


@cache
def utils() -> Any:
    """``qwen_vl_utils.vision_process``; skips the test where it is not installed."""
    if importlib.util.find_spec("qwen_vl_utils") is None:
        pytest.skip("qwen-vl-utils is not installed (pip install --no-deps qwen-vl-utils)")
    with _stand_ins():
        return importlib.import_module("qwen_vl_utils.vision_process")


def of_file(frames: np.ndarray, rate: float, **requested: Any) -> tuple[np.ndarray, float]:
    """What it makes of a file that holds ``frames`` uint8 [n, h, w, 3]: float [taken, 3, h, w], and their rate."""

    class VideoReader:
        def __init__(self, path: str) -> None: ...

        def __len__(self) -> int:
            return len(frames)

        def get_avg_fps(self) -> float:
            return rate

        def get_batch(self, indices: list[int]) -> Any:
            return SimpleNamespace(asnumpy=lambda: frames[indices])

    reader = ModuleType("decord")
    vars(reader)["VideoReader"] = VideoReader
    module = utils()
    before = sys.modules.get("decord"), module.get_video_reader_backend
    sys.modules["decord"] = reader
    module.get_video_reader_backend = lambda: "decord"
    readers, module.VIDEO_READER_BACKENDS = module.VIDEO_READER_BACKENDS, {"decord": module._read_video_decord}
    module.VIDEO_READER_BACKENDS["torchvision"] = module._read_video_decord  # its second try after an error
    try:
        video, taken = module.fetch_video({"video": "clip", **requested}, return_video_sample_fps=True)
    finally:
        module.get_video_reader_backend, module.VIDEO_READER_BACKENDS = before[1], readers
        del sys.modules["decord"]
        if before[0] is not None:
            sys.modules["decord"] = before[0]
    return video.numpy(), float(taken)


def size_of(frames: int, height: int, width: int, **requested: Any) -> list[int]:
    """[height, width] that it resizes a file's frames to; AssertionError or ValueError where it refuses."""
    module, seen = utils(), []
    functional = module.transforms.functional
    kept = functional.resize, module.get_video_reader_backend, module.VIDEO_READER_BACKENDS
    try:
        functional.resize = lambda video, size, **k: seen.append(list(size)) or torch.zeros(1)
        module.get_video_reader_backend = lambda: "none"
        read = lambda ele: (SimpleNamespace(shape=(frames, 3, height, width)), {}, 2.0)  # noqa: E731
        module.VIDEO_READER_BACKENDS = {"none": read, "torchvision": read}
        module.fetch_video({"video": "clip", **requested})
    finally:
        functional.resize, module.get_video_reader_backend, module.VIDEO_READER_BACKENDS = kept
    return seen[0]


def of_list(frames: list[Any], **requested: Any) -> tuple[np.ndarray, float]:
    """What it makes of a list of PIL images."""
    video, rate = utils().fetch_video({"video": list(frames), **requested}, return_video_sample_fps=True)
    return video.numpy(), float(rate)


def pixel_values(video: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """float [n, 3, h, w] of whole bytes to transformers' pixel values [patches, 1176] and grid (t, h, w).

    Its image processor repeats an image over a temporal patch: the halves of two of them are one of a video.
    """
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = [Image.fromarray(f.transpose(1, 2, 0).astype(np.uint8)) for f in video]
    images += [images[-1]] * (len(images) % 2)
    made = Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 1 << 30})(images, return_tensors="pt")
    _, h, w = made["image_grid_thw"][0].tolist()
    values = made["pixel_values"].view(len(images) // 2, 2, h * w, 3, 2, 196)
    both = torch.stack([values[:, 0, :, :, 0], values[:, 1, :, :, 1]], 3)
    return both.reshape(-1, 1176), [len(images) // 2, h, w]
