"""The server's side of decoding: sends files to decode workers under limits, and checks their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar, cast

from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.errors import BadRequest
from trencadis.multimodal import media_timing
from trencadis.multimodal.decode_workers.worker_pool import Job, JobResult, WorkerPool
from trencadis.multimodal.images.image_header import DAMAGED, MAX_IMAGE_PIXELS, Header
from trencadis.multimodal.processor import PreparedImage, Processor

T = TypeVar("T")
BASE_SECONDS = 5.0
PIXELS_PER_SECOND = 5_000_000
"""A tenth of a slow machine's speed; the largest image gets 41 s."""
BASE_BYTES = 96 << 20
"""Bytes of address space that the decoders need for themselves."""
BYTES_PER_PIXEL = 24
"""Bytes per pixel of the file: laying transparency on white holds five copies of 4 bytes."""
BYTES_PER_RESIZED_PIXEL = 24
"""Bytes per pixel of the resized image: the image, its state after one pass, the array, the patches twice."""


class ImageDecoder:
    """Converts image files to patches in worker processes; digests and headers are computed in threads.

    Args:
        max_pixels: most pixels of one image, checked before it is decoded (VLLM_MAX_IMAGE_PIXELS).
        threads: number of workers, and of threads; None: one per CPU, at most 8.
        pool: the workers; None: a new pool.
    """

    def __init__(
        self, max_pixels: int = MAX_IMAGE_PIXELS, threads: int | None = None, pool: WorkerPool | None = None
    ) -> None:
        self.max_pixels = max_pixels
        self.pool = pool or WorkerPool(threads)
        self._threads = ThreadPoolExecutor(threads or min(8, available_cpus()), thread_name_prefix="decode")

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread. Work that a hostile file could attack belongs in a worker instead."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def prepare(self, data: bytes, header: Header, processor: Processor, digest: str) -> PreparedImage:
        """Decodes, resizes and cuts the first frame of ``data`` in a worker.

        Args:
            data: a whole file.
            header: the result of ``inspect_header`` for it.
            digest: digest of the result.

        Raises:
            TrencadisError: see ``decode``, ``Processor.prepare`` and ``WorkerPool.run``.
        """
        begun = time.perf_counter()
        answer = await self.pool.run(self.job(header, len(data), processor), data)
        media_timing.record_prepared(time.perf_counter() - begun, answer.values.get("resize_seconds"))
        # In a thread: digests of a dozen tiles take milliseconds.
        return await self.run(partial(image_from_answer, answer, header, processor, digest))

    def job(self, header: Header, size: int, processor: Processor) -> Job:
        """Returns the job for an image of ``size`` bytes, with its limits of time and memory."""
        resized = processor.compute_geometry(header.height, header.width).area
        memory = (
            BASE_BYTES + 3 * size + BYTES_PER_PIXEL * header.width * header.height + BYTES_PER_RESIZED_PIXEL * resized
        )
        options = {"max_pixels": self.max_pixels, "processor": asdict(cast(Any, processor))}
        seconds = BASE_SECONDS + header.width * header.height / PIXELS_PER_SECOND
        return Job("image", options, seconds, memory, reply=8 * resized)

    def close(self) -> None:
        """Ends the workers at once, and the threads when their work is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.pool.close()


def image_from_answer(answer: JobResult, header: Header, processor: Processor, digest: str) -> PreparedImage:
    """Checks a worker's answer against the header: a hostile file may control its worker.

    Returns:
        The image, whose ``pixels`` are uint8 [patches, patch values].

    Raises:
        BadRequest: sizes or buffers differ from what the header implies.
    """
    resized, original = answer.values.get("resized"), answer.values.get("original")
    if original not in ([header.height, header.width], [header.width, header.height]) or len(answer.buffers) != 1:
        raise BadRequest(DAMAGED)
    made = processor.compute_geometry(*original)
    pixels = answer.buffers[0]
    if resized != list(made.resized) or pixels.size != made.patches * processor.values:
        raise BadRequest(DAMAGED)
    return made.make_prepared(pixels.reshape(made.patches, -1), digest, (original[0], original[1]))
