"""The jobs that decode workers know, by name.

A job is a function (data, options) -> (values, buffers): ``data`` is the file's bytes, ``options`` and ``values`` are
JSON objects, ``buffers`` raw bytes. It raises TrencadisError (400, 413 or 415) for what the sender of the bytes did
wrong, and may take as much memory and time as the caller granted. To add one: write the function in a module that
imports neither torch nor the server, name it in ``JOBS``, and call ``Pool.run(Job(name, options, ...), data)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from trencadis.multimodal.decode import decode, draft
from trencadis.multimodal.header import inspect_header
from trencadis.multimodal.processor import ImageProcessor

Values = dict[str, Any]
Function = Callable[[bytearray, Values], tuple[Values, Sequence[memoryview]]]

JOBS = {
    "image": "trencadis.multimodal.jobs:image",
    "video": "trencadis.multimodal.video_jobs:clip",
}
"""Name to ``module:function``; the module is imported in the worker, when the job is first asked for."""


def load(name: str, more: Mapping[str, str]) -> Function:
    """The function of a job; ``more`` stands beside the table.

    Raises:
        KeyError: no such job.
    """
    module, _, function = {**JOBS, **more}[name].partition(":")
    found: Function = getattr(import_module(module), function)
    return found


def image(data: bytearray, options: Values) -> tuple[Values, Sequence[memoryview]]:
    """A picture's first frame, resized and cut.

    Args:
        options: ``max_pixels`` of the file, and ``processor``, the fields of an ImageProcessor.

    Returns:
        ``resized`` and ``original`` (height, width), both upright, the seconds of resizing and cutting, and uint8
        [patches, 1176]; errors as of
        ``inspect_header``, ``decode`` and ``ImageProcessor.prepare``.
    """
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options["processor"].items()}
    processor = ImageProcessor(**fields)
    header = inspect_header(data, options["max_pixels"])
    shrink = draft(header, *processor.resized(header.height, header.width))
    picture = decode(data, header, shrink)
    original = (picture.height, picture.width)
    if shrink > 1:
        turned = picture.size != (-(-header.width // shrink), -(-header.height // shrink))
        original = (header.width, header.height) if turned else (header.height, header.width)
    begun = time.perf_counter()
    made = processor.prepare(picture, "", original)
    values = {"resized": made.resized, "original": original, "resize_seconds": time.perf_counter() - begun}
    return values, [made.pixels.data.cast("B")]
