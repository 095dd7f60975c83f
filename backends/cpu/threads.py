"""How many threads torch should use: as many cores as the process may really occupy."""

from __future__ import annotations

import math
import os
from pathlib import Path


def threads() -> int:
    """The affinity mask's cores, or fewer where the control group's quota is smaller; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def _quota() -> float | None:
    """Cores' worth of CPU time that the control group allows, or None."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        limit_us = int((base / "cpu.cfs_quota_us").read_text())
        return limit_us / int((base / "cpu.cfs_period_us").read_text()) if limit_us > 0 else None
    except (OSError, ValueError):
        return None
