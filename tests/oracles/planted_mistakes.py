"""Functions with a mistake in them, so that what a test compares is known to find it."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def planted(module: ModuleType, name: str, old: str, new: str, users: tuple[ModuleType, ...] = ()) -> Iterator[None]:
    """Function ``name`` of ``module`` with ``old`` replaced by ``new``, in ``users`` that imported it, too."""
    kept = getattr(module, name)
    source = inspect.getsource(getattr(kept, "fn", kept))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    text, file = source.replace(old, new), f"<planted {name}: {new[:40]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), module.__dict__)
    made = getattr(module, name)
    for user in users:
        setattr(user, name, made)
    try:
        yield
    finally:
        for user in (module, *users):
            setattr(user, name, kept)
