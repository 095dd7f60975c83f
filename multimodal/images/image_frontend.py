"""Prepares the images of a request: loads their sources, decodes, resizes and cuts them into patches."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray
from PIL import Image

from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.errors import BadRequest, attach_param
from trencadis.core.host_memory import limited_budget
from trencadis.multimodal import media_timing_and_concurrency
from trencadis.multimodal.decode_workers.worker_pool import MAX_WORKERS, MEMORY_BUDGET, WorkerPool
from trencadis.multimodal.images.image_decode_client import ImageDecoder, array_to_image, is_array
from trencadis.multimodal.images.image_header import MAX_IMAGE_PIXELS, Header, inspect_header
from trencadis.multimodal.images.pil_decode import load_pil_image
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_OPTIONS, NO_SCOPE, MediaPart, MediaScope
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.multimodal.media_uuids import UuidRegistry, make_miss_error
from trencadis.multimodal.processor_interface import PreparedImage, Processor
from trencadis.multimodal.sources.media_loader import MediaLoader, MediaPermits, is_web_url

ImageSource = str | Path | bytes | Image.Image | NDArray[Any]
"""A URL (data, http, https, file), a path, the bytes of a file, a PIL image, or an array."""
DECODE_SHARE = 1 / 6
"""Largest share of the memory of this machine or container for decoding jobs."""
NO_IMAGE = "An image is a URL, a path, a PIL image, an array or the bytes of a file; image_embeds are not supported."

Work = Callable[[str], Awaitable[PreparedImage]]
"""Decodes an image; the argument is the digest of the result."""


class OpenedSource(NamedTuple):
    """An image before decoding.

    Args:
        content: digest of the file's content, independent of processing.
        size: (height, width) in pixels before any EXIF rotation.
        work: decodes, resizes and cuts it.
    """

    content: str
    size: tuple[int, int]
    work: Work


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one prompt, and of all requests together.

    Args:
        images: most images of one prompt (--limit-mm-per-prompt).
        max_pixels: most pixels of one image before it is resized (VLLM_MAX_IMAGE_PIXELS).
        threads: images decoded at a time; None: one per CPU, at most 8.
        concurrent: images of all requests in preparation: loaded, not yet cut into patches.
        downloads: images of all requests that are downloading, or downloaded and waiting for their preparation.
        memory: bytes granted to all decoding jobs together (``limited_budget`` of them).
    """

    images: int = 999
    max_pixels: int = MAX_IMAGE_PIXELS
    threads: int | None = None
    concurrent: int = 16
    downloads: int = 32
    memory: int = MEMORY_BUDGET

    def divide(self, count: int) -> ImageLimits:
        """Returns the limits of one of ``count`` processes: limits for all requests together are divided."""
        threads = self.threads or min(MAX_WORKERS, available_cpus())
        return replace(
            self,
            threads=max(threads // count, 1),
            concurrent=max(self.concurrent // count, 1),
            downloads=max(self.downloads // count, 1),
            memory=self.memory // count,
        )


class ImageFrontend:
    """Loads, checks, decodes, resizes and cuts images. The event loop only waits; threads and workers do the work.

    Args:
        processor: the checkpoint's image processor.
        loader: loads URLs and paths.
        cache: holds prepared images.
        limits: None: the defaults.
    """

    def __init__(
        self,
        processor: Processor,
        loader: MediaLoader,
        cache: ProcessorCache,
        limits: ImageLimits | None = None,
    ) -> None:
        self.processor = processor
        self.loader = loader
        self.cache = cache
        self.limits = limits or ImageLimits()
        budget = limited_budget(self.limits.memory, DECODE_SHARE)
        self.decoder = ImageDecoder(
            self.limits.max_pixels, self.limits.threads, WorkerPool(self.limits.threads, budget=budget)
        )
        self.uuids = UuidRegistry()
        self._permits = MediaPermits(self.limits.concurrent, self.limits.downloads)

    async def prepare(
        self, parts: Sequence[MediaPart | tuple[ImageSource, str]], scope: MediaScope = NO_SCOPE
    ) -> list[PreparedImage]:
        """Prepares every part, in order; the first error cancels the others.

        Args:
            parts: content parts, or pairs (source, JSON path of the content part).

        Raises:
            BadRequest: too many images (``param`` is ``image``); or, as for all other errors with the part's JSON path
                as ``param``: an invalid image or option, or a ``uuid`` without data that names no cached image.
            Conflict: the ``uuid`` names another image.
            Forbidden, TooLarge, UnsupportedMedia, Unprocessable: see ``MediaLoader.load`` and ``decode``.
            QueueFull: raised by ``scope.charge``.
        """
        if len(parts) > self.limits.images:
            raise BadRequest(f"At most {self.limits.images} image(s) may be provided in one prompt.", param="image")
        if scope.options != NO_OPTIONS:
            self.processor.with_options(scope.options, "mm_processor_kwargs")
        return await gather_or_cancel(
            self._prepare_part(MediaPart(*part)._replace(position=i), scope) for i, part in enumerate(parts)
        )

    def close(self) -> None:
        """Ends the workers at once, and the threads when their work is done."""
        self.decoder.close()
        self.loader.close()

    async def _prepare_part(self, part: MediaPart, scope: MediaScope) -> PreparedImage:
        with attach_param(part.path):
            options, processor = part.options.merge_over(scope.options), self.processor
            if options != NO_OPTIONS:
                processor = processor.with_options(options, part.path)
            if is_web_url(part.source):
                return await self._prepare_remote(part, part.source, scope, processor)
            async with self._permits.preparing():
                return await self._prepare_loaded(part, scope, processor)

    async def _prepare_remote(
        self, part: MediaPart, url: str, scope: MediaScope, processor: Processor
    ) -> PreparedImage:
        """Downloads an image, then prepares it."""
        scope.on_fetch()
        async with self._permits.hold(partial(self._download, url, part.path)) as data:
            return await self._prepare_loaded(part._replace(source=data), scope, processor)

    async def _prepare_loaded(self, part: MediaPart, scope: MediaScope, processor: Processor) -> PreparedImage:
        """Prepares an image that needs no download."""
        if part.uuid is not None or part.source is None:
            return await self._prepare_named(part, scope, processor)
        return await self._prepare_opened(await self._open_source(part, processor), scope, processor)

    async def _prepare_opened(self, source: OpenedSource, scope: MediaScope, processor: Processor) -> PreparedImage:
        """Returns the image of a source, from the cache or decoded now."""
        scope.charge(processor.compute_geometry(*source.size).area)
        digest = processed_digest(source.content, processor)
        return await self.cache.load(cache_key(scope.salt, digest), partial(source.work, digest))

    async def _prepare_named(self, part: MediaPart, scope: MediaScope, processor: Processor) -> PreparedImage:
        """Prepares an image with a uuid; without data the uuid identifies it."""
        if part.source is None:
            return await self._prepare_by_uuid(part, scope, processor)
        name = part.uuid or ""
        source = await self._open_source(part, processor)
        self.uuids.check(scope.tenant, scope.salt, name, source.content)
        made = await self._prepare_opened(source, scope, processor)
        self.uuids.remember(scope.tenant, scope.salt, name, source.content)
        return made

    async def _download(self, url: str, path: str) -> bytes:
        with media_timing_and_concurrency.time_stage("fetch"):
            return await self.loader.load(url, path)

    async def _prepare_by_uuid(self, part: MediaPart, scope: MediaScope, processor: Processor) -> PreparedImage:
        """Returns the cached image for a uuid without data; raises BadRequest if there is none."""
        content = self.uuids.find(scope.tenant, scope.salt, part.uuid or "")
        made = None
        if content is not None:
            made = await self.cache.find(cache_key(scope.salt, processed_digest(content, processor)))
        if made is None:
            raise make_miss_error("image", part.position)
        scope.charge(made.resized[0] * made.resized[1])
        return made

    async def _open_source(self, part: MediaPart, processor: Processor) -> OpenedSource:
        """Loads a source and reads its header without decoding it."""
        source = part.source
        if is_array(source) or isinstance(source, Image.Image):
            return await self._open_decoded(source, processor)
        with media_timing_and_concurrency.time_stage("fetch"):
            data = await self.loader.load(source, part.path) if isinstance(source, str | Path) else source
        if not isinstance(data, bytes):
            raise BadRequest(NO_IMAGE)
        content, header = await self.decoder.run(partial(self._inspect, data))
        size = header.height, header.width
        return OpenedSource(content, size, lambda digest: self.decoder.prepare(data, header, processor, digest))

    async def _open_decoded(self, source: Any, processor: Processor) -> OpenedSource:
        """Opens an offline caller's array or PIL image."""
        if not isinstance(source, Image.Image):
            source = await self.decoder.run(partial(array_to_image, source))
        image, content = await self.decoder.run(partial(self._load_pil, source))
        return OpenedSource(content, (image.height, image.width), partial(self._prepare_pil, image, processor))

    async def _prepare_pil(self, image: Image.Image, processor: Processor, digest: str) -> PreparedImage:
        begun = time.perf_counter()
        made = await self.decoder.run(partial(processor.prepare, image, digest))
        seconds = time.perf_counter() - begun
        media_timing_and_concurrency.record_prepared(seconds, seconds)
        return made

    def _load_pil(self, image: Image.Image) -> tuple[Image.Image, str]:
        image = load_pil_image(image, self.limits.max_pixels)
        return image, content_digest(image.tobytes(), f"{image.width}x{image.height}")

    def _inspect(self, data: bytes) -> tuple[str, Header]:
        header = inspect_header(data, self.limits.max_pixels)
        return content_digest(data, "file"), header


def content_digest(data: bytes, kind: str) -> str:
    """Returns a 256-bit hex digest of the bytes and of their kind (``file``, ``WIDTHxHEIGHT``, ...)."""
    digest = hashlib.blake2b(f"{kind}\0".encode(), digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def processed_digest(content: str, processor: Processor) -> str:
    """Returns a 256-bit hex digest of the content and of every processor setting that changes its patches."""
    return hashlib.blake2b(f"{content}\0{processor.fingerprint}".encode(), digest_size=32).hexdigest()


def cache_key(salt: str, digest: str) -> str:
    """Returns the key for ProcessorCache. A salt contains no NUL, so keys of two salts never collide."""
    return f"{salt}\0{digest}"
