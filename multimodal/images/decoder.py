"""The parent's side of decoding images: header and limits first, then a decode worker, then a check of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TypeVar

from trencadis.core.cpus import available_cpus
from trencadis.core.errors import BadRequest
from trencadis.multimodal import stages
from trencadis.multimodal.images.header import DAMAGED, MAX_IMAGE_PIXELS, Header
from trencadis.multimodal.images.processor import ImageProcessor, Prepared
from trencadis.multimodal.images.sizes import grid_of, slots_of, tokens_of
from trencadis.multimodal.workers.pool import Answer, Job, WorkerPool

T = TypeVar("T")
BASE_SECONDS = 5.0
PIXELS_PER_SECOND = 5_000_000
"""A tenth of what a slow machine decodes: the largest image has 41 s."""
BASE_BYTES = 96 << 20
"""Bytes of address space for the decoders themselves."""
BYTES_PER_PIXEL = 24
"""Bytes per pixel of the file: transparency laid on white holds five images of 4 bytes at a time."""
BYTES_PER_RESIZED_PIXEL = 24
"""Bytes per pixel of the resized image: itself, its half-way state, the array, the patches twice."""


class ImageDecoder:
    """Turns files of images into patches, in worker processes; digests and headers in a few threads.

    Args:
        max_pixels: of one image, checked before it is decoded (VLLM_MAX_IMAGE_PIXELS).
        threads: workers, and threads beside them; None takes one per CPU, at most 8.
        pool: of workers; None makes one of its own.
    """

    def __init__(
        self, max_pixels: int = MAX_IMAGE_PIXELS, threads: int | None = None, pool: WorkerPool | None = None
    ) -> None:
        self.max_pixels = max_pixels
        self.pool = pool or WorkerPool(threads)
        self._threads = ThreadPoolExecutor(threads or min(8, available_cpus()), thread_name_prefix="decode")

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread: what concerns only bytes that are known to be harmless."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def prepare(self, data: bytes, header: Header, processor: ImageProcessor, digest: str) -> Prepared:
        """The first frame of ``data``, whose header was inspected, decoded, resized and cut in a worker.

        Raises:
            TrencadisError: as of ``decode``, ``ImageProcessor.prepare`` and ``WorkerPool.run``.
        """
        begun = time.perf_counter()
        answer = await self.pool.run(self.job(header, len(data), processor), data)
        stages.record_prepared(time.perf_counter() - begun, answer.values.get("resize_seconds"))
        return image_from_answer(answer, header, processor, digest)

    def job(self, header: Header, size: int, processor: ImageProcessor) -> Job:
        """What a worker is asked, and granted, for an image of ``size`` bytes."""
        height, width = processor.target_size(header.height, header.width)
        resized = height * width
        memory = (
            BASE_BYTES + 3 * size + BYTES_PER_PIXEL * header.width * header.height + BYTES_PER_RESIZED_PIXEL * resized
        )
        options = {"max_pixels": self.max_pixels, "processor": asdict(processor)}
        seconds = BASE_SECONDS + header.width * header.height / PIXELS_PER_SECOND
        return Job("image", options, seconds, memory, reply=8 * resized)

    def close(self) -> None:
        """Ends the workers, and the threads once they are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.pool.close()


def image_from_answer(answer: Answer, header: Header, processor: ImageProcessor, digest: str) -> Prepared:
    """A worker's answer, if it is what the header lets one expect; a worker may have been taken over by its image.

    Raises:
        BadRequest: it is not.
    """
    resized, original = answer.values.get("resized"), answer.values.get("original")
    if original not in ([header.height, header.width], [header.width, header.height]) or len(answer.buffers) != 1:
        raise BadRequest(DAMAGED)
    height, width = processor.target_size(*original)
    grid = grid_of(height, width, processor.patch)
    patches, pixels = grid[1] * grid[2], answer.buffers[0]
    if resized != [height, width] or pixels.size != patches * 3 * processor.temporal * processor.patch**2:
        raise BadRequest(DAMAGED)
    cut, tokens = pixels.reshape(patches, -1), tokens_of(grid, processor.merge)
    return Prepared(digest, cut, grid, tokens, slots_of(grid), (height, width), (original[0], original[1]))
