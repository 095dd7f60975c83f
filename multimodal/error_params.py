"""Adds to media errors the request field that caused them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trencadis.core.errors import TrencadisError


@contextmanager
def attach_param(param: str | None) -> Iterator[None]:
    """Sets ``param``, a request field, on every TrencadisError raised in the block that has none."""
    try:
        yield
    except TrencadisError as error:
        if param is None or error.param is not None:
            raise
        raise type(error)(error.message, param=param, retry_after=error.retry_after) from None
