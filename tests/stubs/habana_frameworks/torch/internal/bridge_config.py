from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

KNOWN = {"PT_COMPILE_ONLY_MODE": False}


@contextmanager
def env_setting(name: str, value: bool) -> Iterator[None]:
    before, KNOWN[name] = KNOWN[name], value
    yield
    KNOWN[name] = before
