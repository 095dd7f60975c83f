"""The front door for images: sources in, prepared patches out, in the order they were given."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from trencadis.core.errors import BadRequest
from trencadis.multimodal import stages
from trencadis.multimodal.errors import attach_param
from trencadis.multimodal.gather import gather_or_cancel
from trencadis.multimodal.images.arrays import array_to_image, is_array
from trencadis.multimodal.images.cache import PreparedCache
from trencadis.multimodal.images.decode import load_pil_image
from trencadis.multimodal.images.decoder import ImageDecoder
from trencadis.multimodal.images.header import MAX_IMAGE_PIXELS, Header, inspect_header
from trencadis.multimodal.images.processor import ImageProcessor, Prepared
from trencadis.multimodal.options import NO_SCOPE, MediaPart, MediaScope
from trencadis.multimodal.sources.loader import MediaLoader, MediaPermits, is_web_url
from trencadis.multimodal.uuids import UuidBook

ImageSource = str | Path | bytes | Image.Image | NDArray[Any]
"""A URL (data, http, https, file), a bare path, the bytes of a file, a decoded image, or an array of one."""
NO_IMAGE = "An image is a URL, a path, a PIL image, an array or the bytes of a file; image_embeds are not supported."

Work = Callable[[str], Awaitable[Prepared]]
"""Takes the digest."""


@dataclass(frozen=True)
class ImageLimits:
    """What one prompt may hold.

    Args:
        images: images of one prompt (--limit-mm-per-prompt).
        max_pixels: of one image before it is resized (VLLM_MAX_IMAGE_PIXELS).
        threads: images decoded at a time; None: one per CPU, at most 8.
        concurrent: images of all requests whose bytes are here and whose patches are not.
        downloads: images of all requests on their way over the web, or waiting for their turn after it.
    """

    images: int = 999
    max_pixels: int = MAX_IMAGE_PIXELS
    threads: int | None = None
    concurrent: int = 16
    downloads: int = 32


class ImageFrontend:
    """Loads, checks, decodes, resizes and cuts images; nothing of it runs on the event loop but the waiting.

    Args:
        processor: the checkpoint's.
        loader: for URLs.
        cache: of prepared images.
        limits: of one prompt.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        loader: MediaLoader,
        cache: PreparedCache,
        limits: ImageLimits | None = None,
    ) -> None:
        self.processor = processor
        self.loader = loader
        self.cache = cache
        self.limits = limits or ImageLimits()
        self.decoder = ImageDecoder(self.limits.max_pixels, self.limits.threads)
        self.uuids = UuidBook()
        self._permits = MediaPermits(self.limits.concurrent, self.limits.downloads)

    async def prepare(
        self, parts: Sequence[MediaPart | tuple[ImageSource, str]], scope: MediaScope = NO_SCOPE
    ) -> list[Prepared]:
        """Prepares every part, or (source, JSON path of its content part); the first error ends the others.

        Raises:
            BadRequest: too many (param ``image``), or an image or option that is wrong (param, as of all others: its
                JSON path), or a ``uuid`` without data whose image is not there.
            Conflict: a ``uuid`` that names another image.
            Forbidden, TooLarge, UnsupportedMedia, Unprocessable: see ``MediaLoader.load`` and ``decode``.
            QueueFull: ``scope.charge`` has no room.
        """
        if len(parts) > self.limits.images:
            raise BadRequest(f"At most {self.limits.images} image(s) may be provided in one prompt.", param="image")
        self.processor.with_options(scope.options, "mm_processor_kwargs")
        return await gather_or_cancel(self._prepare_part(MediaPart(*part), scope) for part in parts)

    def prepare_now(
        self, parts: Sequence[MediaPart | tuple[ImageSource, str]], scope: MediaScope = NO_SCOPE
    ) -> list[Prepared]:
        """``prepare`` for callers without an event loop, or inside one that they may block."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(self.prepare(parts, scope))).result()

    def close(self) -> None:
        """Ends the threads once they are idle."""
        self.decoder.close()
        self.loader.close()

    async def _prepare_part(self, part: MediaPart, scope: MediaScope) -> Prepared:
        with attach_param(part.path):
            processor = self.processor.with_options(part.options.over(scope.options), part.path)
            download = partial(self._download, part.source, part.path) if is_web_url(part.source) else None
            async with self._permits.hold(download) as data:
                part = part if data is None else part._replace(source=data)
                if part.source is None:
                    return await self._prepare_by_uuid(part, scope, processor)
                content, size, work = await self._open_source(part, processor)
                if part.uuid is not None:
                    self.uuids.check(scope.tenant, scope.salt, part.uuid, content)
                height, width = processor.target_size(*size)
                scope.charge(height * width)
                digest = processed_digest(content, processor)
                made = await self.cache.load(cache_key(scope.salt, digest), partial(work, digest))
                if part.uuid is not None:
                    self.uuids.remember(scope.tenant, scope.salt, part.uuid, content)
                return made

    async def _download(self, url: str, path: str) -> bytes:
        with stages.timed_stage("fetch"):
            return await self.loader.load(url, path)

    async def _prepare_by_uuid(self, part: MediaPart, scope: MediaScope, processor: ImageProcessor) -> Prepared:
        """The kept image that a uuid without data stands for."""
        content = self.uuids.find(scope.tenant, scope.salt, part.uuid or "")
        made = None
        if content is not None:
            made = await self.cache.find(cache_key(scope.salt, processed_digest(content, processor)))
        if made is None:
            raise BadRequest("No image is kept under this uuid; send it with its data.")
        scope.charge(made.resized[0] * made.resized[1])
        return made

    async def _open_source(self, part: MediaPart, processor: ImageProcessor) -> tuple[str, tuple[int, int], Work]:
        """A digest of the image alone, its (height, width) before any EXIF rotation, and what decodes it."""
        source = part.source
        if is_array(source):
            source = await self.decoder.run(partial(array_to_image, source))
        if isinstance(source, Image.Image):
            image, content = await self.decoder.run(partial(self._load_pil, source))
            size = image.height, image.width
            return content, size, partial(self._prepare_pil, image, processor)
        with stages.timed_stage("fetch"):
            data = await self.loader.load(source, part.path) if isinstance(source, str | Path) else source
        if not isinstance(data, bytes):
            raise BadRequest(NO_IMAGE)
        content, header = await self.decoder.run(partial(self._inspect, data))
        size = header.height, header.width
        return content, size, lambda digest: self.decoder.prepare(data, header, processor, digest)

    async def _prepare_pil(self, image: Image.Image, processor: ImageProcessor, digest: str) -> Prepared:
        begun = time.perf_counter()
        made = await self.decoder.run(partial(processor.prepare, image, digest))
        seconds = time.perf_counter() - begun
        stages.record_prepared(seconds, seconds)
        return made

    def _load_pil(self, image: Image.Image) -> tuple[Image.Image, str]:
        image = load_pil_image(image, self.limits.max_pixels)
        return image, content_digest(image.tobytes(), f"{image.width}x{image.height}")

    def _inspect(self, data: bytes) -> tuple[str, Header]:
        header = inspect_header(data, self.limits.max_pixels)
        return content_digest(data, "file"), header


def content_digest(data: bytes, kind: str) -> str:
    """256 bits over the bytes and what they are."""
    digest = hashlib.blake2b(f"{kind}\0".encode(), digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def processed_digest(content: str, processor: ImageProcessor) -> str:
    """256 bits over the content and all that the patches depend on beside it."""
    return hashlib.blake2b(f"{content}\0{processor.fingerprint}".encode(), digest_size=32).hexdigest()


def cache_key(salt: str, digest: str) -> str:
    """The processor cache's key; a salt holds no NUL."""
    return f"{salt}\0{digest}"
