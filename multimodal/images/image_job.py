"""The decode worker's job for images: decode, resize, cut into patches. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trencadis.multimodal.decode_workers.job_table import Values
from trencadis.multimodal.images.image_header import inspect_header
from trencadis.multimodal.images.pil_decode import decode, jpeg_shrink
from trencadis.multimodal.processor import build_processor


def prepare_image(data: bytearray, options: Values) -> tuple[Values, Sequence[memoryview]]:
    """Decodes an image's first frame, resizes it and cuts it into patches.

    Args:
        data: a whole file.
        options: ``max_pixels``, a limit for the file; ``processor``, the fields of a Processor.

    Returns:
        ``resized`` and ``original``, (height, width) of the upright image in pixels, and ``resize_seconds``; and one
        buffer, uint8 [patches, patch values].

    Raises:
        TrencadisError: see ``inspect_header``, ``decode`` and ``Processor.prepare``.
    """
    processor = build_processor(options["processor"])
    header = inspect_header(data, options["max_pixels"])
    shrink = jpeg_shrink(header, *processor.compute_geometry(header.height, header.width).resized)
    image = decode(data, header, shrink)
    original = (image.height, image.width)
    if shrink > 1:
        rotated = image.size != (-(-header.width // shrink), -(-header.height // shrink))
        original = (header.width, header.height) if rotated else (header.height, header.width)
    begun = time.perf_counter()
    made = processor.prepare(image, "", original)
    values = {"resized": made.resized, "original": original, "resize_seconds": time.perf_counter() - begun}
    return values, [made.pixels.data.cast("B")]
