"""The use of one tenant: token buckets per minute, and its requests inside the server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from trencadis.core.errors import KeyLimitReached
from trencadis.server.tenants.api_key_file import RATES, Tenant

MINUTE = 60.0
HEADERS = {"requests_per_minute": "requests", "tokens_per_minute": "tokens", "pixels_per_minute": "pixels"}
LONGEST = 120
"""Largest Retry-After, in seconds."""

FIRST_LENGTH = 256.0
"""Tokens that a choice is expected to have before a tenant has had any."""
LEARNING = 16
"""Answers over which the usual length is averaged."""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: holds at most a minute's worth, and refills evenly.

    It may fall below zero, as what an answer without a limit costs is known only once it is written; then it is closed
    until it is above zero again.
    """

    rate: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        """Adds the refill since the last call."""
        self.left = min(self.rate, self.left + (now - self.at) * self.rate / MINUTE)
        self.at = now

    def wait(self, wanted: float) -> float:
        """Returns the seconds until ``wanted`` fits; a larger amount than the whole bucket needs a full one."""
        return max(0.0, (min(wanted, self.rate) - self.left) * MINUTE / self.rate)


@dataclass(slots=True)
class TenantAccount:
    """One tenant and its use. For one event loop.

    Args:
        inside: choices inside the server now.
        used: requests, tokens and pixels since the start, by their names in ``RATES``.
        rejected: refusals by the name of the limit.
        usual_length: tokens of a choice, averaged over the last ones.
    """

    tenant: Tenant
    clock: Callable[[], float] = time.monotonic
    inside: int = 0
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RATES, 0.0))
    rejected: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    usual_length: float = FIRST_LENGTH

    def __post_init__(self) -> None:
        self._fit_buckets()

    def _fit_buckets(self) -> None:
        now, old = self.clock(), self.buckets
        self.buckets = {}
        for name, rate in self.tenant.rates.items():
            before = old.get(name)
            spent = 0.0 if before is None else before.rate - before.left
            self.buckets[name] = TokenBucket(rate, rate - spent, now)

    def update_tenant(self, tenant: Tenant) -> None:
        """Replaces the tenant by another entry of the same name; amounts spent in this minute stay spent."""
        self.tenant = tenant
        self._fit_buckets()

    def enter(self, requests: int, more: bool = False) -> None:
        """Admits ``requests`` choices of one HTTP request.

        Args:
            more: other choices of the request are inside already.

        Raises:
            KeyLimitReached: a limit is reached; the message names it.
        """
        most = self.tenant.concurrency
        if most and self.inside + requests > most:
            self._refuse("concurrency", 1)
        if not more:
            self.take("requests_per_minute", 1)
        self.inside += requests

    def take(self, name: str, count: float, reserved: float = 0.0) -> None:
        """Spends ``count`` of a rate, if the bucket has it.

        Args:
            reserved: taken from the bucket too, though not used yet; ``give_back`` returns it.

        Raises:
            KeyLimitReached: the bucket holds less.
        """
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.refill(self.clock())
            wait = bucket.wait(count + reserved)
            if wait > 0:
                self._refuse(name, max(1, min(LONGEST, math.ceil(wait))))
            bucket.left -= count + reserved
        self.used[name] += count

    def spend(self, name: str, count: float) -> None:
        """Spends an amount that was already served, such as the tokens of an answer."""
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.refill(self.clock())
            bucket.left -= count
        self.used[name] += count

    def refund(self, name: str, count: float) -> None:
        """Returns to the bucket the amount that ``take`` spent on a request that was not served."""
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.left = min(bucket.rate, bucket.left + count)
        self.used[name] -= count

    def give_back(self, name: str, reserved: float) -> None:
        """Returns what ``take`` reserved."""
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.refill(self.clock())
            bucket.left = min(bucket.rate, bucket.left + reserved)

    def record_answer(self, tokens: int, choices: int) -> None:
        """Spends the tokens of an answer of ``choices`` choices, whose usual length is learned from it."""
        self.spend("tokens_per_minute", tokens)
        if tokens and choices:
            self.usual_length += (tokens / choices - self.usual_length) / LEARNING

    def leave(self, requests: int) -> None:
        """Records that choices have left the server."""
        self.inside -= requests

    @property
    def own(self) -> int:
        """Number of choices inside that came through this process."""
        return self.inside

    def _refuse(self, limit: str, wait: int) -> None:
        self.rejected[limit] = self.rejected.get(limit, 0) + 1
        raise KeyLimitReached(f"The limit {limit} of this key is reached; try again later.", retry_after=wait)

    def make_headers(self) -> Iterator[tuple[str, str]]:
        """Yields ``x-ratelimit-*`` headers for OpenAI's clients: the limit, the rest, and the seconds until it is
        full again.
        """
        now = self.clock()
        for name, bucket in self.buckets.items():
            bucket.refill(now)
            word = HEADERS[name]
            yield f"x-ratelimit-limit-{word}", f"{bucket.rate:.0f}"
            yield f"x-ratelimit-remaining-{word}", f"{max(bucket.left, 0):.0f}"
            yield f"x-ratelimit-reset-{word}", f"{max(bucket.wait(bucket.rate), 0):.3f}s"


CURRENT: ContextVar[TenantAccount | None] = ContextVar("trencadis_account", default=None)
"""The account of the HTTP request that this task serves; None without a key file."""
