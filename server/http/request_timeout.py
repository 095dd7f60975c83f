"""Time limit of a request: the operator's, or a shorter one that the client requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable

from starlette.datastructures import Headers

from trencadis.core.errors import BadRequest, DeadlineExceeded
from trencadis.server.records.request_record import RequestRecord

HEADER = "x-request-timeout"
TIMEOUT_MESSAGE = "The request did not end within its {:g} seconds."


def get_timeout(headers: Headers, most: float) -> float:
    """Returns the seconds that a request may take; 0: no limit.

    Args:
        most: the operator's limit; 0: none.

    Raises:
        BadRequest: the header is not a positive number.
    """
    written = headers.get(HEADER)
    if written is None:
        return most
    try:
        asked = float(written)
    except ValueError:
        asked = math.nan
    if not 0 < asked < math.inf:
        raise BadRequest(f"{HEADER} must be a positive number of seconds.", param=HEADER)
    return min(asked, most) if most else asked


async def run_within(record: RequestRecord, seconds: float, work: Awaitable[None]) -> None:
    """Waits for ``work``, which is cancelled if its answer has not begun in time; a stream checks the deadline itself.

    Args:
        seconds: limit, counted from the request's arrival.

    Raises:
        DeadlineExceeded: the limit is exceeded, and nothing has been sent.
    """
    record.deadline = record.begun + seconds
    timer = record.timer = asyncio.timeout_at(record.deadline)
    try:
        async with timer:
            await work
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineExceeded(TIMEOUT_MESSAGE.format(seconds)) from None
    finally:
        record.timer = None


def stop_timer(record: RequestRecord) -> None:
    """Stops the request's timer: after the status line has been sent a timeout can no longer change it."""
    if record.timer is not None and not record.timer.expired():
        record.timer.reschedule(None)
