"""Links an API process to the others: shared media, adapters and limits, and requests that the front answers.

Prepared images and videos as bytes, for another API process whose client refers to one by its uuid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from trencadis.core.errors import NotFound
from trencadis.core.json_types import Json, JsonObject
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.processor_interface import PlaceholderRun, PreparedImage, PreparedVideo
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission, Bounds
from trencadis.server.tenants.shared_limits_table import (
    HELD,
    SharedAccount,
    SharedAdmission,
    SharedMediaUuids,
    SharedTable,
)
from trencadis.server.tenants.tenant_registry import Tenant, TenantAccount


class MediaSides(Protocol):
    """The parts of the text service that prepare media; a side without a cache shares nothing."""

    images: Any
    videos: Any


def pack_media(made: PreparedImage | PreparedVideo) -> bytes:
    """Encodes a prepared image or video, including pixels."""
    return msgspec.msgpack.encode(_encode_video(made) if isinstance(made, PreparedVideo) else _encode_image(made))


def unpack_media(data: bytes) -> PreparedImage | PreparedVideo:
    """Decodes the result of ``pack_media``."""
    found = msgspec.msgpack.decode(data)
    if "patches" not in found:
        return _decode_image(found)
    patches = tuple(map(_decode_image, found.pop("patches")))
    return PreparedVideo(**{**found, "indices": tuple(found["indices"])}, patches=patches)


def _encode_video(made: PreparedVideo) -> JsonObject:
    return {
        "digest": made.digest, "indices": made.indices, "fps": made.fps, "seconds": made.seconds,
        "frames": made.frames, "rate": made.rate, "patches": [_encode_image(one) for one in made.patches],
    }  # fmt: skip


def _encode_image(made: PreparedImage) -> JsonObject:
    return {
        "digest": made.digest, "shape": made.pixels.shape, "pixels": np.ascontiguousarray(made.pixels).tobytes(),
        "grid": made.grid, "tokens": made.tokens, "slots": made.slots, "resized": made.resized,
        "original": made.original, "items": [_encode_image(one) for one in made.items],
        "layout": [one if isinstance(one, str) else [*one] for one in made.layout],
    }  # fmt: skip


def _decode_image(found: JsonObject) -> PreparedImage:
    pixels = np.frombuffer(found["pixels"], np.uint8).reshape(found["shape"])
    return PreparedImage(
        found["digest"], pixels, tuple(found["grid"]), found["tokens"], found["slots"], tuple(found["resized"]),
        tuple(found["original"]), tuple(map(_decode_image, found["items"])),
        tuple(one if isinstance(one, str) else PlaceholderRun(*one) for one in found["layout"]),
    )  # fmt: skip


CONNECTIONS, FAIR_QUEUED = HELD.index("connections"), HELD.index("turns")
Answer = Callable[[JsonObject], Awaitable[bytes]]


class FrontAsker(Protocol):
    """Protocol for asking the front process."""

    async def ask(self, method: str, **given: Json) -> bytes:
        """See ``Channel``."""
        ...


class SharedProcessState:
    """Shared state of API process ``table.index`` of ``table.count``.

    Args:
        front: asks the front process, and through it the other API processes.
        answers: handlers of the front's questions, by name.
    """

    def __init__(self, front: FrontAsker, answers: dict[str, Answer], table: SharedTable) -> None:
        self._front, self._answers, self.table = front, answers, table

    @property
    def index(self) -> int:
        """Index of this API process."""
        return self.table.index

    @property
    def count(self) -> int:
        """Number of API processes."""
        return self.table.count

    def make_admission(self, bounds: Bounds) -> Admission:
        """Makes the bounded queue that all processes share."""
        return SharedAdmission(bounds, self.table)

    def make_account(self, tenant: Tenant, clock: Callable[[], float]) -> TenantAccount:
        """Makes a tenant's account that all processes share."""
        return SharedAccount(tenant, clock, self.table)

    def share_media(self, service: MediaSides) -> None:
        """Shares media uuids among all API processes, and fetches prepared media from the process that has them."""
        images, videos = service.images, service.videos
        cache = getattr(images, "cache", None)
        if not isinstance(cache, ProcessorCache):
            return
        uuids = SharedMediaUuids(self.table)
        for side in (images, videos):
            if hasattr(side, "uuids"):
                side.uuids = uuids
        cache.find_in_other_process = cast(Any, self._fetch_media)
        self._answers["media"] = partial(self._answer_media, cache)
        self._answers["forget media"] = partial(self._answer_forget_media, cache)

    async def _fetch_media(self, key: str) -> Any:
        """Fetches a medium that another process has prepared; None if none has."""
        found = await self._front.ask("media", key=key)
        return unpack_media(found) if found else None

    async def _answer_media(self, cache: ProcessorCache, given: JsonObject) -> bytes:
        found = cache.peek(given["key"])
        if found is None:
            raise NotFound("It is not cached here.")
        return pack_media(found)

    async def _answer_forget_media(self, cache: ProcessorCache, given: JsonObject) -> bytes:
        cache.clear()
        return b""

    # --- what all know together ---

    async def fetch_metrics(self) -> bytes:
        """Returns Prometheus' text of the whole server."""
        return await self._front.ask("metrics")

    async def fetch_buckets(self) -> bytes:
        """Returns the JSON of ``/buckets``."""
        return await self._front.ask("buckets")

    async def forget_media(self) -> None:
        """Drops prepared media in all processes."""
        await self._front.ask("forget media")

    def share_adapters(self, change: Callable[[JsonObject], Awaitable[None]]) -> None:
        """Applies changes of adapters that any API process asks for with ``change``."""

        async def answer(given: JsonObject) -> bytes:
            await change(given)
            return b""

        self._answers["change adapters"] = answer

    async def change_adapters(self, change: JsonObject) -> None:
        """Loads or unloads an adapter in all API processes."""
        await self._front.ask("change adapters", **change)

    def update_connections(self, own: int) -> int:
        """Records how many connections this process has; returns how many the others have."""
        self.table.put(CONNECTIONS, own)
        return self.table.total(CONNECTIONS) - own

    def update_fair_queued(self, own: int) -> int:
        """Records how many requests wait in this process's fair queue; returns the number of all processes."""
        self.table.put(FAIR_QUEUED, own)
        return self.table.total(FAIR_QUEUED)
