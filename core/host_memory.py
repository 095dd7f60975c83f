"""Host memory that this process may use: the machine's, or less if one of its control groups has a limit.

Formats byte counts for messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
OOM_SCORE = Path("/proc/self/oom_score_adj")
UNLIMITED = 1 << 60


class GroupMemory(NamedTuple):
    """A control group with a limit: its bytes, and those in use that are no page cache."""

    limit: int
    used: int


def total_host() -> int:
    """Returns the bytes that this process may use at most."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(group.limit for group in _read_groups())])


def free_host() -> int:
    """Returns the bytes that can still be allocated without swapping; page cache counts as free."""
    available = _meminfo("MemAvailable") or total_host()
    return max(0, min([available, *(group.limit - group.used for group in _read_groups())]))


def limited_budget(usual: int, share: float) -> int:
    """Returns a budget of memory: ``usual``, or less if that is more than a share of what this process may use.

    Args:
        usual: bytes on a machine with memory to spare.
        share: largest part of ``total_host``.
    """
    return min(usual, int(total_host() * share))


def volunteer_for_oom_kill(score: int) -> None:
    """Lets the kernel end this process before others when memory runs out; does nothing where that is not allowed.

    Args:
        score: from 1 to 1000. A process that another one starts again has a score; who starts them has none.
    """
    with suppress(OSError):
        OOM_SCORE.write_text(str(max(score, int(OOM_SCORE.read_text()))))


def _read_groups() -> list[GroupMemory]:
    """Returns the control groups of this process that have a limit: its own, and those that hold it.

    In a container the root of the mounted hierarchy is the container's own group.
    """
    return [found for folder, v2 in _list_folders() if (found := _read_group(folder, v2)) is not None]


def _list_folders() -> Iterator[tuple[Path, bool]]:
    """Yields the folders of this process's memory groups, each with whether it is of cgroup v2."""
    try:
        lines = SELF.read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", "memory": "/"}
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "" or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = path
    for mount, v2, path in ((ROOT / "memory", False, paths["memory"]), (ROOT, True, paths[""])):
        folder = mount / path.strip("/")
        while True:
            if folder.is_dir():
                yield folder, v2
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _read_group(folder: Path, v2: bool) -> GroupMemory | None:
    limit = _read_int(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
    used = _read_int(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
    if limit is None or used is None or limit >= UNLIMITED:
        return None
    return GroupMemory(limit, max(used - _file_cache(folder, "" if v2 else "total_"), 0))


def _file_cache(folder: Path, prefix: str) -> int:
    """Returns the bytes of page cache; cgroup v1 counts those of groups inside under names with a prefix."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return sum(int(values.get(f"{prefix}{name}", values.get(name, 0))) for name in ("inactive_file", "active_file"))


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def gib(count: int) -> str:
    """Formats ``count`` bytes as "1.50 GiB" or "12.0 MiB"."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"
