"""Counts the CPUs that this process may use, by which thread pools are sized. Torch-free."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: those of its affinity, limited by the cgroup's quota (v2, then v1)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cpus
    if not quota.isdigit():
        return cpus
    return max(1, min(cpus, math.ceil(int(quota) / int(period))))


def computing_cpus(
    cgroup: Path = Path("/sys/fs/cgroup"),
    machine: Path = Path("/sys/devices/system/cpu"),
    usable: Iterable[int] | None = None,
) -> int:
    """Threads for products: ``available_cpus``, but one of each core, whose second thread has no units of its own.

    Args:
        usable: CPUs of this process (None: its affinity).
    """
    available = available_cpus(cgroup)
    if usable is None:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    try:
        cores = {(machine / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip() for cpu in usable}
    except OSError:
        return available
    return min(available, len(cores)) if cores else available
