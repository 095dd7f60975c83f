"""Prepares the videos of a request: loads their sources; samples, decodes, resizes and cuts frames."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image

from trencadis.core.errors import BadRequest, TooLarge, attach_param
from trencadis.core.json_types import Json, JsonObject
from trencadis.multimodal import media_timing_and_concurrency
from trencadis.multimodal.decode_workers.worker_pool import Job, JobResult
from trencadis.multimodal.images.image_decode_client import ImageDecoder, array_to_frames, array_to_image, is_array
from trencadis.multimodal.images.image_frontend import cache_key, content_digest
from trencadis.multimodal.images.pil_decode import load_pil_image
from trencadis.multimodal.images.processor_cache import ProcessorCache, Unshared
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import (
    MAX_CLIP_FRAMES,
    MAX_CLIP_SECONDS,
    NO_OPTIONS,
    NO_SCOPE,
    MediaOptions,
    MediaPart,
    MediaScope,
    refuse_num_crops,
)
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.multimodal.media_uuids import UuidRegistry, make_miss_error
from trencadis.multimodal.patch_packing import count_slots, count_tokens
from trencadis.multimodal.processor_interface import PreparedImage, PreparedVideo, VideoProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader, MediaPermits, is_web_url
from trencadis.multimodal.videos.frame_sampling import FRAMES_PER_PATCH, FrameLimits
from trencadis.multimodal.videos.video_job import FramePart

FRAME_PIXELS = 1 << 26
"""Maximum pixels of a frame before resizing: twice an 8K frame. A smaller limit for images applies to frames too."""
FETCH_TIMEOUT = 30.0
"""Default of VLLM_VIDEO_FETCH_TIMEOUT, seconds."""
DECODE_SECONDS = 120.0
DECODE_MEMORY = 1 << 30
"""Bytes of address space for a decoder and its reference frames."""
FRAMES_AT_A_TIME = 8
"""Number of frames of a list that are loaded together."""
BAD_VIDEO = "The video is truncated or damaged."
JPEG_LIST = "data:video/jpeg;base64,"


@dataclass(frozen=True)
class VideoLimits:
    """Limits of one prompt, and of all requests together.

    Args:
        videos: maximum number of videos of one prompt (--limit-mm-per-prompt).
        frames: maximum number of frames sampled from one video.
        seconds: longest duration of a video file.
        concurrent: maximum number of videos, over all requests, in preparation: loaded, not yet cut into patches.
        downloads: maximum number of videos, over all requests, that are downloading, or downloaded and waiting for
            their preparation.
    """

    videos: int = 999
    frames: int = MAX_CLIP_FRAMES
    seconds: float = MAX_CLIP_SECONDS
    concurrent: int = 4
    downloads: int = 8


@dataclass(frozen=True)
class VideoContent:
    """A video's bytes as sent to a worker: one file, or the frames of a list one after the other.

    Args:
        data: the bytes.
        parts: size and kind of each frame of a list; None: ``data`` is one video file.
    """

    data: bytes
    parts: tuple[FramePart, ...] | None = None

    @property
    def digest(self) -> str:
        """256-bit hex digest of the bytes and of ``parts``."""
        return content_digest(self.data, "video" if self.parts is None else f"frames {tuple(map(tuple, self.parts))}")


class VideoFrontend:
    """Loads, checks, samples, decodes, resizes and cuts videos; decoding runs in worker processes.

    Args:
        processor: the checkpoint's image processor, whose limits apply to frames.
        loader: loads URLs and paths.
        cache: holds prepared media, shared with ImageFrontend.
        decoder: ImageFrontend's decoder, which owns the workers.
        limits: None: the defaults.
        uuids: shared with ImageFrontend; None: its own.
        options: the server's options (--mm-processor-kwargs); a request's own take precedence.
    """

    def __init__(
        self,
        processor: VideoProcessor,
        loader: MediaLoader,
        cache: ProcessorCache,
        decoder: ImageDecoder,
        limits: VideoLimits | None = None,
        uuids: UuidRegistry | None = None,
        options: MediaOptions = NO_OPTIONS,
    ) -> None:
        self.options = options
        self.processor = processor
        self.loader = loader
        self.cache = cache
        self.decoder = decoder
        self.limits = limits or VideoLimits()
        self.uuids = UuidRegistry() if uuids is None else uuids
        self.frames = FrameLimits(**processor.frame_limits())
        self._permits = MediaPermits(self.limits.concurrent, self.limits.downloads)

    async def prepare(
        self, parts: Sequence[MediaPart], tokens_left: int, scope: MediaScope = NO_SCOPE
    ) -> list[PreparedVideo]:
        """Prepares every part, in order; the first error cancels the others.

        Args:
            tokens_left: tokens that the prompt has left for each video.

        Raises:
            BadRequest: too many videos (``param`` is ``video``); or, as for all other errors with the part's JSON path
                as ``param``: an invalid video or option, or a ``uuid`` without data that names no cached video.
            Conflict: the ``uuid`` names other media.
            TooLarge: too long, or too many frames or pixels.
            Forbidden, UnsupportedMedia, Unprocessable: see ``MediaLoader.load`` and ``video_job.prepare_video``.
            QueueFull: raised by ``scope.charge``.
        """
        if len(parts) > self.limits.videos:
            raise BadRequest(f"At most {self.limits.videos} video(s) may be provided in one prompt.", param="video")
        return await gather_or_cancel(
            self._prepare_part(part._replace(position=i), tokens_left, scope) for i, part in enumerate(parts)
        )

    def close(self) -> None:
        """Shuts down the loader's threads. ImageFrontend closes the decoder."""
        self.loader.close()

    async def _prepare_part(self, part: MediaPart, tokens_left: int, scope: MediaScope) -> PreparedVideo:
        with attach_param(part.path):
            requested = part.options.merge_over(scope.video_options.merge_over(self.options))
            refuse_num_crops(requested.num_crops, part.path)
            fetch = None
            if _has_web_url(part.source):
                scope.on_fetch()
                fetch = partial(self._timed_load, part)
            async with self._permits.hold(fetch) as content:
                if part.source is None:
                    made = await self._prepare_by_uuid(part, requested, scope)
                else:
                    made = await self._prepare_content(
                        part, content or await self._timed_load(part), requested, tokens_left, scope
                    )
                scope.charge(made.resized[0] * made.resized[1] * FRAMES_PER_PATCH * len(made.patches))
                return made

    async def _prepare_content(
        self, part: MediaPart, content: VideoContent, requested: MediaOptions, tokens_left: int, scope: MediaScope
    ) -> PreparedVideo:
        content_hash = await self.decoder.run(lambda: content.digest)
        if part.uuid is not None:
            self.uuids.check(scope.tenant, scope.salt, part.uuid, content_hash)
        digest = self._digest(content_hash, requested)
        work = partial(self._decode, content, requested, digest, tokens_left)
        # ProcessorCache is typed for images but only needs ``nbytes``.
        made = cast(PreparedVideo, await self.cache.load(cache_key(scope.salt, digest), cast(Any, work)))
        if part.uuid is not None:
            self.uuids.remember(scope.tenant, scope.salt, part.uuid, content_hash)
        return made

    async def _prepare_by_uuid(self, part: MediaPart, requested: MediaOptions, scope: MediaScope) -> PreparedVideo:
        """Returns the cached video that a uuid without data names; raises BadRequest if there is none."""
        content_hash = self.uuids.find(scope.tenant, scope.salt, part.uuid or "")
        made = (
            None
            if content_hash is None
            else await self.cache.find(cache_key(scope.salt, self._digest(content_hash, requested)))
        )
        if made is None:
            raise make_miss_error("video", part.position)
        return cast(PreparedVideo, made)

    def _digest(self, content: str, requested: MediaOptions) -> str:
        """Returns a 256-bit hex digest of the content and of every setting that changes its patches."""
        text = f"{content}\0{self.processor.fingerprint}\0{requested.key}"
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    async def _decode(
        self, content: VideoContent, requested: MediaOptions, digest: str, tokens_left: int
    ) -> PreparedVideo:
        options: JsonObject = {
            "media": requested.given,
            "limits": asdict(self.frames),
            "max_pixels": min(self.decoder.max_pixels, FRAME_PIXELS),
            "max_frames": self.limits.frames,
            "max_seconds": self.limits.seconds,
            "room": tokens_left,
        }
        if content.parts is not None:
            options["parts"] = content.parts
        reply = (tokens_left + 1) * self.frames.cell**2 * FRAMES_PER_PATCH * 3
        memory = DECODE_MEMORY + 2 * len(content.data) + 2 * reply
        job = Job("video", options, DECODE_SECONDS, memory, reply)
        begun = time.perf_counter()
        answer = await self.decoder.pool.run(job, content.data)
        media_timing_and_concurrency.record_prepared(time.perf_counter() - begun, answer.values.get("resize_seconds"))
        if isinstance(text := answer.values.get("no_room"), str):
            raise Unshared(BadRequest(text))
        return await self.decoder.run(partial(video_from_answer, answer, self.frames, digest, self.limits.frames))

    # Bytes

    async def _timed_load(self, part: MediaPart) -> VideoContent:
        with media_timing_and_concurrency.time_stage("fetch"):
            return await self._load_content(part)

    async def _load_content(self, part: MediaPart) -> VideoContent:
        source = part.source
        if isinstance(source, str) and source.startswith(JPEG_LIST):
            source = [f"data:image/jpeg;base64,{frame}" for frame in source.removeprefix(JPEG_LIST).split(",")]
        if is_array(source):
            source = await self.decoder.run(partial(array_to_frames, source))
        if isinstance(source, list | tuple):
            return await self._load_frames(source, part.path)
        return VideoContent(await self._load_bytes(source, part.path))

    async def _load_frames(self, sources: Sequence[object], path: str) -> VideoContent:
        if not sources:
            raise BadRequest("The video has no frames.")
        if len(sources) > self.limits.frames:
            raise TooLarge(f"The video has {len(sources)} frames; the limit is {self.limits.frames}.")
        data, parts = bytearray(), []
        for start in range(0, len(sources), FRAMES_AT_A_TIME):
            some = sources[start : start + FRAMES_AT_A_TIME]
            for bytes_, height, width in await gather_or_cancel(self._load_frame(s, path) for s in some):
                data += bytes_
                parts.append(FramePart(len(bytes_), height, width))
                if len(data) > self.loader.max_bytes:
                    raise TooLarge(f"The video's frames have more than {self.loader.max_bytes} bytes in all.")
        return VideoContent(bytes(data), tuple(parts))

    async def _load_frame(self, source: object, path: str) -> _LoadedFrame:
        if is_array(source):
            source = await self.decoder.run(partial(array_to_image, source))
        if isinstance(source, Image.Image):
            return await self.decoder.run(partial(_to_raw_rgb, source, self.decoder.max_pixels))
        return _LoadedFrame(await self._load_bytes(source, path))

    async def _load_bytes(self, source: object, path: str) -> bytes:
        if isinstance(source, bytes):
            return source
        if isinstance(source, str | Path):
            return await self.loader.load(source, path)
        raise BadRequest("A video is a URL, a list of frames, or the bytes of a file.")


def _has_web_url(source: object) -> bool:
    """Returns True if a source, or a frame of a list, is an http(s) URL."""
    return any(map(is_web_url, source)) if isinstance(source, list | tuple) else is_web_url(source)


class _LoadedFrame(NamedTuple):
    """A frame: the bytes of its file, or raw RGB of ``height`` x ``width`` pixels if they are not 0."""

    data: bytes
    height: int = 0
    width: int = 0


def _to_raw_rgb(image: Image.Image, max_pixels: int) -> _LoadedFrame:
    image = load_pil_image(image, max_pixels)
    return _LoadedFrame(image.tobytes(), image.height, image.width)


def video_from_answer(answer: JobResult, limits: FrameLimits, digest: str, most: int) -> PreparedVideo:
    """Checks a worker's answer against the limits (a hostile file may control its worker) and builds the video of it.

    Args:
        most: maximum number of sampled frames.

    Returns:
        The video; the ``pixels`` of its patches are uint8 [patches, patch values].

    Raises:
        BadRequest: the answer cannot come from a valid video.
    """
    v: JsonObject = {"indices": None, "fps": None, "frames": None, "size": None, "rate": None, **answer.values}
    indices, fps, frames, size = v["indices"], v["fps"], v["frames"], v["size"]
    rates = (fps, v["rate"])
    if not _is_valid(indices, size, frames, most) or not all(isinstance(r, float) and 0 < r < math.inf for r in rates):
        raise BadRequest(BAD_VIDEO)
    height, width = size
    grid = limits.grid((height, width))
    patches = grid[1] * grid[2]
    tokens, slots, nbytes = (
        count_tokens(grid),
        count_slots(grid, limits.windows),
        patches * 3 * FRAMES_PER_PATCH * limits.patch**2,
    )
    fits = limits.fits(grid) and not (height % limits.factor or width % limits.factor)
    if (
        not fits
        or len(answer.buffers) * FRAMES_PER_PATCH != len(indices)
        or any(b.size != nbytes for b in answer.buffers)
    ):
        raise BadRequest(BAD_VIDEO)
    first = PreparedImage("", answer.buffers[0], grid, tokens, slots, (height, width))
    items = tuple(
        replace(first, digest=patch_digest(b, height, width), pixels=b.reshape(patches, -1)) for b in answer.buffers
    )
    return PreparedVideo(digest, items, tuple(indices), fps, FRAMES_PER_PATCH / fps, frames, v["rate"])


def _is_valid(indices: Json, size: Json, frames: Json, most: int) -> bool:
    """Returns True if ``indices`` are ascending frame indices below ``frames``, and ``size`` a height and a width."""
    if not isinstance(indices, list) or not isinstance(size, list):
        return False
    numbers = [*indices, *size, frames]
    if len(size) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        return False
    ascending = all(a <= b for a, b in pairwise(indices))
    return 0 < len(indices) <= most + 1 and ascending and 0 <= indices[0] <= indices[-1] < frames and min(size) > 0


def patch_digest(pixels: Any, height: int, width: int) -> str:
    """Returns a 256-bit hex digest of a temporal patch: equal frames share arena rows, whatever their video and frame
    rate.

    Args:
        pixels: uint8 of any shape; ``height`` and ``width``: of the frames in pixels.
    """
    digest = hashlib.blake2b(b"frames %d %d\0" % (height, width), digest_size=32)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
