"""Host memory that this process may use: the machine's, or its control group's if that is smaller.

Formats byte counts for messages.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP2 = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
CGROUP1 = (
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
STATS = (Path("/sys/fs/cgroup/memory.stat"), Path("/sys/fs/cgroup/memory/memory.stat"))


def total_host() -> int:
    """Returns the bytes that this process may use at most."""
    limit = _limit()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, limit[0]) if limit else machine


def free_host() -> int:
    """Returns the bytes that can still be allocated without swapping; page cache counts as free."""
    available = _meminfo("MemAvailable") or total_host()
    limit = _limit()
    if limit is None:
        return available
    return max(0, min(available, limit[0] - limit[1] + _file_cache()))


def _limit() -> tuple[int, int] | None:
    """Returns (limit, current) of the control group, or None if there is no limit."""
    for limit_path, current_path in (CGROUP2, CGROUP1):
        limit, current = _read_int(limit_path), _read_int(current_path)
        if limit is not None and current is not None and limit < 1 << 60:
            return limit, current
    return None


def _file_cache() -> int:
    for path in STATS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        values = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return 0


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
