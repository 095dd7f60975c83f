"""The emulated recipe cache on disk: one file per recipe. Any fault of it is one warning and a new compilation."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Hashable
from pathlib import Path

from trencadis.backends.hpu.emulator.recipes.config import VARIABLE, RecipeCacheConfig

log = logging.getLogger("trencadis.engine")

SUFFIX = ".emulated"

OP_BYTES = 4096
"""Size in bytes that one operation of a recipe counts for: the file holds only the number of operations."""


class SavedRecipes:
    """Recipes of earlier starts.

    Args:
        version: release and card; recipes of another version are compiled again.
    """

    def __init__(self, config: RecipeCacheConfig, version: str) -> None:
        assert config.folder is not None
        self.folder, self.version = config.folder, version
        self.limit = config.megabytes << 20
        self.hits = 0
        self._writes = True
        self._held = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"*{SUFFIX}") if config.clear else ():
                path.unlink()
            self._held = sum(self._size(p) for p in self.folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            self._stop(error)

    def has(self, key: Hashable) -> bool:
        """Returns True if the folder holds the recipe; a damaged file is reported, and compiled again by the caller."""
        path = self._path(key)
        try:
            found = json.loads(path.read_bytes())
            whole = bool(found["sum"] == self._sum(path.stem, found["ops"]))
        except OSError:
            return False
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            log.warning("recipe %s is damaged: it is compiled again and replaced", path)
        self.hits += whole
        return whole

    def keep(self, key: Hashable, ops: int) -> None:
        """Stores a compiled recipe. If the folder cannot be written, one warning is logged and nothing more is
        stored.
        """
        if not self._writes:
            return
        path = self._path(key)
        text = json.dumps({"ops": ops, "sum": self._sum(path.stem, ops)})
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True) if part.exists() else None
            self._stop(error)
            return
        self._held += ops * OP_BYTES
        if self.limit and self._held > self.limit:
            self._shrink()

    def _shrink(self) -> None:
        """Removes the oldest recipes until the folder is within its limit."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda p: p.stat().st_mtime_ns):
            if self._held <= self.limit:
                return
            self._held -= self._size(path)
            path.unlink(missing_ok=True)

    def _stop(self, error: OSError) -> None:
        self._writes = False
        log.warning(
            "%s: no recipe is kept in %s (%s): the next start compiles again; name a folder with room in %s",
            VARIABLE, self.folder, error.strerror or error, VARIABLE,
        )  # fmt: skip

    def _path(self, key: Hashable) -> Path:
        name = hashlib.sha256(f"{self.version}|{key!r}".encode()).hexdigest()
        return self.folder / f"{name}{SUFFIX}"

    def _sum(self, name: str, ops: int) -> str:
        return hashlib.sha256(f"{name}|{ops}".encode()).hexdigest()

    def _size(self, path: Path) -> int:
        try:
            return int(json.loads(path.read_bytes())["ops"]) * OP_BYTES
        except (OSError, ValueError, KeyError, TypeError):
            return 0
