"""Runs awaitables concurrently and cancels the rest after the first error. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Returns the results in order; the first error, or the caller's cancellation, cancels the others.

    A bare ``gather`` would let them continue: downloads and decoding for a request that has already been answered.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
