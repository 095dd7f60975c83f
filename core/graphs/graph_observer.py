"""The callbacks of a GraphManager: reports of events, and the query why a bucket has no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trencadis.core.buckets import Bucket


class GraphAccounts(Protocol):
    """Decides which buckets have a graph and accounts for their bytes; implemented by ``GraphCaptures``."""

    def capture_at_first_use(self, bucket: Bucket) -> None:
        """Called when a launch has made ``bucket`` compile for the first time."""
        ...

    def refund_released(self, bucket: Bucket, returned: int) -> None:
        """Called when the graph of ``bucket`` was released to free memory; ``returned`` bytes were recovered."""
        ...

    def missing_reason(self, bucket: Bucket) -> str:
        """Returns why a compiled bucket has no graph."""
        ...


class GraphObserver:
    """Observes one GraphManager, which receives it at construction.

    The accounts are attached once, later: their budget comes from a profile that runs on the same manager.

    Args:
        enter: sets the phase that health checks report; returns the previous one.
        lazy: True if warm-up is skipped, so that a graph is captured at the first use of its bucket.
    """

    def __init__(self, enter: Callable[[str], str] = lambda phase: phase, lazy: bool = False) -> None:
        self.enter, self._lazy = enter, lazy
        self._accounts: GraphAccounts | None = None

    def attach(self, accounts: GraphAccounts) -> None:
        """Sets the accounts of the manager's graphs; may be called only once."""
        assert self._accounts is None, "a manager's graphs have one set of accounts"
        self._accounts = accounts

    def note_first_use(self, bucket: Bucket) -> None:
        """Reports that a planned bucket was compiled for a launch; captures its graph if ``lazy``."""
        if self._lazy and self._accounts is not None:
            self._accounts.capture_at_first_use(bucket)

    def note_released(self, bucket: Bucket, returned: int) -> None:
        """Reports that a graph was released to free memory."""
        if self._accounts is not None:
            self._accounts.refund_released(bucket, returned)

    def missing_reason(self, bucket: Bucket) -> str:
        """Returns why a compiled bucket has no graph; "" while no accounts are attached."""
        return "" if self._accounts is None else self._accounts.missing_reason(bucket)
