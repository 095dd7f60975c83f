"""Clients' own names for media, of which only digests are stored."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock

from trencadis.core.errors import BadRequest, Conflict

ENTRIES = 1 << 16
"""Most names that are stored; about 250 bytes each."""
UUID_CONFLICT = "This uuid already names other media; use a new one for other bytes."


def make_miss_error(kind: str, index: int) -> BadRequest:
    """Returns the error for a uuid without data that names nothing which is cached, in vLLM's words.

    ``index``: the position among the prompt's media of this ``kind``, from 0.
    """
    return BadRequest(f"Cache miss for {kind} at index {index} but data is not provided; send it with its data.")


class UuidRegistry:
    """A bounded LRU from names to content digests, safe across threads.

    A name belongs to its tenant and salt: no tenant can read another's names or clash with them.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._content: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._content)

    def find(self, tenant: str, salt: str, uuid: str) -> str | None:
        """Returns the digest that the name stands for, or None."""
        name = name_digest(tenant, salt, uuid)
        with self._lock:
            if name in self._content:
                self._content.move_to_end(name)
            return self._content.get(name)

    def check(self, tenant: str, salt: str, uuid: str, content: str) -> None:
        """Checks that the name is free or stands for ``content``.

        Raises:
            Conflict: it stands for other content.
        """
        if self.find(tenant, salt, uuid) not in (None, content):
            raise Conflict(UUID_CONFLICT)

    def remember(self, tenant: str, salt: str, uuid: str, content: str) -> None:
        """Assigns the name to ``content``; called once that has been decoded and is known to be an image or video.

        Raises:
            Conflict: it stands for other content.
        """
        name = name_digest(tenant, salt, uuid)
        with self._lock:
            if self._content.setdefault(name, content) != content:
                raise Conflict(UUID_CONFLICT)
            self._content.move_to_end(name)
            if len(self._content) > self._entries:
                self._content.popitem(last=False)


def name_digest(tenant: str, salt: str, uuid: str) -> bytes:
    """Returns a digest (24 bytes) of the triple.

    Each part is preceded by its length, so that no two triples give the same bytes.
    """
    parts = [p.encode("utf-8", "surrogatepass") for p in (tenant, salt, uuid)]
    return hashlib.blake2b(b"".join(b"%d:" % len(p) + p for p in parts), digest_size=24).digest()
