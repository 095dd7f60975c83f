"""What an API process has as one of several: limits that it shares, and questions that only all can answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from trencadis.core.errors import NotFound
from trencadis.multimodal.images.cache import PreparedCache
from trencadis.server.admission import Admission, Bounds
from trencadis.server.front import media
from trencadis.server.front.limits import SharedAccount, SharedAdmission, SharedUuids
from trencadis.server.front.table import HELD, SharedTable
from trencadis.server.tenants.account import Account
from trencadis.server.tenants.keyfile import Tenant

if TYPE_CHECKING:
    from trencadis.server.prompts.service import TextService

CONNECTIONS, TURNS = HELD.index("connections"), HELD.index("turns")
Answer = Callable[[dict[str, Any]], Awaitable[bytes]]


class Asker(Protocol):
    """Asks the front."""

    async def ask(self, what: str, **given: Any) -> bytes:
        """See ``Channel``."""
        ...


class Part:
    """API process ``table.index`` of ``table.count``.

    Args:
        front: asks all the others.
        answers: to what the front asks this one, by question.
    """

    def __init__(self, front: Asker, answers: dict[str, Answer], table: SharedTable) -> None:
        self._front, self._answers, self.table = front, answers, table

    @property
    def index(self) -> int:
        """Which one it is."""
        return self.table.index

    @property
    def count(self) -> int:
        """How many there are."""
        return self.table.count

    def admission(self, bounds: Bounds) -> Admission:
        """The bounded queue of all."""
        return SharedAdmission(bounds, self.table)

    def account(self, tenant: Tenant, clock: Callable[[], float]) -> Account:
        """A tenant's account with all."""
        return SharedAccount(tenant, clock, self.table)

    def share_media(self, service: TextService) -> None:
        """Names of media are known to all; what one has prepared, the others get where a client names it by uuid."""
        images, videos = cast(Any, service.images), cast(Any, service.videos)
        cache = getattr(images, "cache", None)
        if not isinstance(cache, PreparedCache):
            return
        book = SharedUuids(self.table)
        for side in (images, videos):
            if hasattr(side, "uuids"):
                side.uuids = book
        cache.elsewhere = cast(Any, self._fetch)
        self._answers["media"] = partial(self._give, cache)
        self._answers["forget media"] = partial(self._forget, cache)

    async def _fetch(self, key: str) -> Any:
        """What another process has prepared; None: none has."""
        found = await self._front.ask("media", key=key)
        return media.unpack(found) if found else None

    async def _give(self, cache: PreparedCache, given: dict[str, Any]) -> bytes:
        found = cache.kept(given["key"])
        if found is None:
            raise NotFound("It is not cached here.")
        return media.pack(found)

    async def _forget(self, cache: PreparedCache, given: dict[str, Any]) -> bytes:
        cache.forget()
        return b""

    # --- what all know together ---

    async def metrics(self) -> bytes:
        """Prometheus' text of the whole server."""
        return await self._front.ask("metrics")

    async def buckets(self) -> bytes:
        """The JSON of ``/buckets``."""
        return await self._front.ask("buckets")

    async def forget_media(self) -> None:
        """Drops what any process has prepared."""
        await self._front.ask("forget media")

    def connections(self, own: int) -> int:
        """Notes how many connections this process has; returns how many the others have."""
        self.table.put(CONNECTIONS, own)
        return self.table.total(CONNECTIONS) - own

    def waiting(self, own: int) -> int:
        """Notes how many requests wait here for their tenant's turn; returns how many do in all processes."""
        self.table.put(TURNS, own)
        return self.table.total(TURNS)
