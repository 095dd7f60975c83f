"""The server's side of decoding: sends files to decode workers under limits, and checks their answers.

Images given as numpy arrays or torch tensors by callers in this process; HTTP requests cannot contain them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.errors import BadRequest
from trencadis.multimodal import media_timing_and_concurrency
from trencadis.multimodal.decode_workers.worker_pool import Job, JobResult, WorkerPool
from trencadis.multimodal.images.image_header import DAMAGED, MAX_IMAGE_PIXELS, Header
from trencadis.multimodal.processor_interface import PreparedImage, Processor

CHANNELS = (3, 4)
ACCEPTED_SHAPES = "[height, width, 3 or 4] or [3 or 4, height, width], of uint8 or of floats between 0 and 1"


def is_array(source: object) -> bool:
    """Returns True if ``source`` is an array or tensor of any library."""
    return hasattr(source, "ndim") and hasattr(source, "dtype")


def array_to_image(source: Any) -> Image.Image:
    """Converts an array or tensor to an RGB or RGBA image; floats are rounded to 256 levels.

    Args:
        source: [height, width, channels] or [channels, height, width] with 3 or 4 channels; uint8, or floats between 0
            and 1. If both ends could be channels, an array's are last and a tensor's first.

    Raises:
        BadRequest: another shape or dtype, or floats outside [0, 1].
    """
    array = _to_numpy(source)
    ends = (0, -1) if hasattr(source, "detach") else (-1, 0)
    axis = next((end for end in ends if array.ndim == 3 and array.size and array.shape[end] in CHANNELS), None)
    if axis is None or not (array.dtype == np.uint8 or np.issubdtype(array.dtype, np.floating)):
        raise BadRequest(
            f"An image as an array is {ACCEPTED_SHAPES}; this is {_describe_array(array)}. Embeddings are not "
            f"supported."
        )
    if array.dtype != np.uint8:
        array = _to_uint8(array)
    return Image.fromarray(np.ascontiguousarray(np.moveaxis(array, axis, -1)))


def array_to_frames(source: Any) -> list[Image.Image]:
    """Converts [frames, ...] to one image per frame with ``array_to_image``.

    Raises:
        BadRequest: there are not four axes, or ``array_to_image`` refuses a frame.
    """
    if source.ndim != 4:
        raise BadRequest(
            f"An array of frames is [frames, ...], each {ACCEPTED_SHAPES}; this one is {_describe_array(source)}."
        )
    return [array_to_image(frame) for frame in source]


def _to_numpy(source: Any) -> NDArray[Any]:
    if hasattr(source, "detach"):  # a torch tensor; numpy has no bfloat16
        source = source.detach().cpu()
        return (source.float() if source.is_floating_point() else source).numpy()  # type: ignore[no-any-return]
    return np.asarray(source)


def _to_uint8(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not bool(((array >= 0) & (array <= 1)).all()):  # NaN fails both comparisons
        raise BadRequest("An image of floats holds values between 0 and 1; convert levels of 0 to 255 to uint8.")
    levels: NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
    return levels


def _describe_array(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


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
        media_timing_and_concurrency.record_prepared(time.perf_counter() - begun, answer.values.get("resize_seconds"))
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
