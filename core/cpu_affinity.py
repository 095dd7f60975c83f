"""Finds the CPUs that this process may use: their number, which sizes thread pools, and their ids. Torch-free."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trencadis.core.errors import StartupError

BIND, RESERVED = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"
"""Environment variables: auto, nobind, or one list of CPUs per rank (0-31|32-63); number of reserved cores per rank."""

Nodes = tuple[tuple[int, ...], ...]
"""The CPUs of each NUMA node, one per core."""


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of CPUs that this process may use: its affinity, limited by the cgroup quota (v2, then v1)."""
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
    """Returns the number of threads for matrix products: ``available_cpus``, but one per core.

    The second hardware thread of a core has no arithmetic units of its own.

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


def nodes_of(
    usable: Iterable[int],
    machine: Path = Path("/sys/devices/system/cpu"),
    nodes: Path = Path("/sys/devices/system/node"),
) -> Nodes:
    """Returns one CPU per core of ``usable``, grouped by NUMA node: the nodes with most cores first, then by number.

    If the system does not list cores or nodes, each CPU counts as a core, and all belong to one node.
    """
    cores = dict[str, int]()
    for cpu in sorted(usable):
        try:
            core = (machine / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = str(cpu)
        cores.setdefault(core, cpu)
    found, left = list[tuple[int, ...]](), set(cores.values())
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda f: int(f.name[4:])):
        try:
            held = left & set(parse_cpu_list((folder / "cpulist").read_text()))
        except (OSError, ValueError):
            continue
        left -= held
        if held:
            found.append(tuple(sorted(held)))
    if left:
        found.append(tuple(sorted(left)))
    return tuple(sorted(found, key=lambda held: -len(held)))


def share_cpus(nodes: Nodes, rank: int, ranks: int, reserved: int = 0) -> tuple[int, ...]:
    """Returns the CPUs of one of ``ranks`` ranks: whole nodes, or a part of one if there are more ranks than nodes.

    ``reserved``: how many of them, counted from the end, stay free; the rank keeps at least one.
    """
    if ranks <= len(nodes):
        mine = [cpu for held in nodes[rank * len(nodes) // ranks : (rank + 1) * len(nodes) // ranks] for cpu in held]
    else:
        node = rank * len(nodes) // ranks
        beside = [other for other in range(ranks) if other * len(nodes) // ranks == node]
        held, position = nodes[node], rank - beside[0]
        first, last = (len(held) * at // len(beside) for at in (position, position + 1))
        mine = list(held[first:last] or held[position % len(held) :][:1])
    return tuple(mine[: max(len(mine) - reserved, 1)])


def choose_cpus(
    text: str, reserved: int, rank: int, ranks: int, threads: int, nodes: Nodes, available: int
) -> tuple[int, ...]:
    """Returns the CPUs to bind a rank's threads to, one each; empty: the threads are not bound.

    ``auto`` binds them if there are several nodes and the process may use all their cores. With a smaller quota it
    shares its CPUs with other processes, and the system's own placement is better.

    Args:
        text, reserved: the values of the variables ``BIND`` and ``RESERVED``.
        threads: number of threads of this rank.
        available: number of CPUs by affinity and quota.

    Raises:
        StartupError: ``text`` has another form or too few lists.
    """
    if text == "nobind":
        return ()
    if text in ("", "auto"):
        if len(nodes) < 2 or available < sum(map(len, nodes)):
            return ()
        found = share_cpus(nodes, rank, ranks, reserved)
        return found[:threads] if len(found) >= threads or reserved else ()
    lists = text.split("|")
    try:
        given = [parse_cpu_list(one) for one in lists]
    except ValueError:
        raise StartupError(f"{BIND}={text!r} is neither auto, nobind nor lists of CPUs like 0-31|32-63") from None
    if len(given) < ranks or not all(given):
        raise StartupError(f"{BIND}={text!r} names CPUs for {len(given)} ranks of {ranks}; lists are parted by |")
    return given[rank]


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parses a list of CPUs such as ``0-3,8,10-11``; raises ValueError for anything else."""
    found = list[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def own_cpus(rank: int, ranks: int, threads: int, text: str, reserved: int) -> Sequence[int]:
    """Returns ``choose_cpus`` for this machine; raises StartupError if it names CPUs that this process may not use."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    usable = os.sched_getaffinity(0)
    found = choose_cpus(text, reserved, rank, ranks, threads, nodes_of(usable), available_cpus())
    if not usable.issuperset(found):
        raise StartupError(f"{BIND}={text!r} names CPUs that this process may not use; it may use {sorted(usable)}")
    return found
