"""What a GraphManager reports, and what it asks about buckets that have no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trencadis.core.buckets import Bucket


class GraphAccounts(Protocol):
    """Decides which buckets have a graph and accounts for their bytes; ``GraphCaptures`` is the one that serves."""

    def capture_at_first_use(self, bucket: Bucket) -> None:
        """A launch needs ``bucket``, which is compiled now and was not prepared."""
        ...

    def refund_released(self, bucket: Bucket, returned: int) -> None:
        """The graph of ``bucket`` was released to relieve memory; ``returned`` bytes came back."""
        ...

    def missing_reason(self, bucket: Bucket) -> str:
        """Why a compiled bucket has no graph."""
        ...


class GraphObserver:
    """Observes one GraphManager, which takes it at construction.

    The accounts are attached once and later: their budget comes from a profile that runs on the same manager.

    Args:
        enter: sets the phase that health checks report; returns the previous one.
        lazy: warm-up is skipped, so that a graph is captured at its bucket's first use.
    """

    def __init__(self, enter: Callable[[str], str] = lambda phase: phase, lazy: bool = False) -> None:
        self.enter, self._lazy = enter, lazy
        self._accounts: GraphAccounts | None = None

    def attach(self, accounts: GraphAccounts) -> None:
        """Names who accounts for the manager's graphs from now on."""
        assert self._accounts is None, "a manager's graphs have one set of accounts"
        self._accounts = accounts

    def note_first_use(self, bucket: Bucket) -> None:
        """A planned bucket was compiled because a launch needs it."""
        if self._lazy and self._accounts is not None:
            self._accounts.capture_at_first_use(bucket)

    def note_released(self, bucket: Bucket, returned: int) -> None:
        """A graph was released to relieve memory."""
        if self._accounts is not None:
            self._accounts.refund_released(bucket, returned)

    def missing_reason(self, bucket: Bucket) -> str:
        """Why a compiled bucket has no graph; "" while nothing is attached."""
        return "" if self._accounts is None else self._accounts.missing_reason(bucket)
