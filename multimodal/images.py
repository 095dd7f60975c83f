"""The front door for pictures: sources in, prepared patches out, in the order they were given."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from PIL import Image

from trencadis.core.errors import BadRequest
from trencadis.multimodal.cache import PreparedCache
from trencadis.multimodal.decode import Decoder, about, adopt
from trencadis.multimodal.header import MAX_IMAGE_PIXELS
from trencadis.multimodal.media import Gates, MediaLoader
from trencadis.multimodal.processor import ImageProcessor, Prepared

ImageSource = str | bytes | Image.Image
"""A URL (data, http, https, file), the bytes of a file, or a decoded picture."""

Work = Callable[[], Awaitable[Prepared]]


@dataclass(frozen=True)
class ImageLimits:
    """What one prompt may hold.

    Args:
        images: pictures of one prompt (--limit-mm-per-prompt).
        max_pixels: of one picture before it is resized (VLLM_MAX_IMAGE_PIXELS).
        threads: pictures decoded at a time; None: one per CPU, at most 8.
        concurrent: pictures of all requests between their fetch and their last patch.
    """

    images: int = 999
    max_pixels: int = MAX_IMAGE_PIXELS
    threads: int | None = None
    concurrent: int = 16


class ImageFrontend:
    """Loads, checks, decodes, resizes and cuts pictures; nothing of it runs on the event loop but the waiting.

    Args:
        processor: the checkpoint's.
        loader: for URLs.
        cache: of prepared pictures.
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
        self.decoder = Decoder(self.limits.max_pixels, self.limits.threads)
        self._gates = Gates(self.limits.concurrent)

    async def prepare(self, sources: Sequence[tuple[ImageSource, str]], salt: str = "") -> list[Prepared]:
        """Prepares every (source, JSON path of its content part); the first error ends the others.

        Args:
            salt: pictures are shared through the cache only under equal salts.

        Raises:
            BadRequest: too many (param ``image``), or a picture that is wrong (param, as of all others: its JSON path).
            Forbidden, TooLarge, UnsupportedMedia, Unprocessable: see ``MediaLoader.load`` and ``decode``.
        """
        if len(sources) > self.limits.images:
            raise BadRequest(f"At most {self.limits.images} image(s) may be provided in one prompt.", param="image")
        tasks = [asyncio.ensure_future(self._one(source, param, salt)) for source, param in sources]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def prepare_now(self, sources: Sequence[tuple[ImageSource, str]], salt: str = "") -> list[Prepared]:
        """``prepare`` for callers without an event loop, or inside one that they may block."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(self.prepare(sources, salt))).result()

    def close(self) -> None:
        """Ends the threads once they are idle."""
        self.decoder.close()
        self.loader.close()

    async def _one(self, source: ImageSource, param: str, salt: str) -> Prepared:
        async with self._gates.here():
            with about(param):
                digest, work = await (
                    self._from_image(source) if isinstance(source, Image.Image) else self._from_file(source, param)
                )
                return await self.cache.load(f"{salt}\0{digest}", work)

    async def _from_image(self, source: Image.Image) -> tuple[str, Work]:
        image, digest = await self.decoder.run(partial(self._digest_image, source))
        return digest, lambda: self.decoder.run(partial(self.processor.prepare, image, digest))

    async def _from_file(self, source: str | bytes, param: str) -> tuple[str, Work]:
        data = await self.loader.load(source, param) if isinstance(source, str) else source
        digest = await self.decoder.run(partial(self._digest, data, "file"))
        return digest, lambda: self.decoder.load(data, partial(self.processor.prepare, digest=digest))

    def _digest_image(self, image: Image.Image) -> tuple[Image.Image, str]:
        image = adopt(image, self.limits.max_pixels)
        return image, self._digest(image.tobytes(), f"{image.width}x{image.height}")

    def _digest(self, data: bytes, kind: str) -> str:
        """256 bits over the bytes, what they are, and all that the patches depend on beside them."""
        head = f"{kind}\0{self.processor.fingerprint}\0".encode()
        digest = hashlib.blake2b(head, digest_size=32)
        digest.update(data)
        return digest.hexdigest()
