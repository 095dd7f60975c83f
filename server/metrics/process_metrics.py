"""CPU time and memory of this server's processes by role, read from /proc at each scrape; no file is written."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis.core.process.log_setup import find_log_queue

API, FRONT, OTHER = "api", "front", "other"
API_MODULE = "trencadis.server.processes.api_server_main"
"""Module in the command line of one of several API processes; the word after the next is its index."""
ROLES = {
    "trencadis.core.process.engine_process": "engine",
    "trencadis.core.executor.rank_process": "rank",
    "trencadis.multimodal.decode_workers.worker_main": "decode_worker",
}
"""Module in the command line of a child process -> its role."""
ALL = (API, *ROLES.values())
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessUse(NamedTuple):
    """One process: its role, CPU seconds (user and system) and resident bytes."""

    role: str
    seconds: float
    resident: int


class ProcessesCollector(Collector):
    """Collector of ``vllm:server_*`` of the process ``root`` and all its descendants.

    Args:
        root: the API process, or the front process of several.
        role: role of ``root``. Several API processes have a role each: ``api-0``.
        proc: folder of the process file system; without it there are no samples.
    """

    def __init__(self, root: int | None = None, proc: Path = Path("/proc"), role: str = API) -> None:
        self._role = role
        self._root = os.getpid() if root is None else root
        self._proc = proc
        self._seen: dict[tuple[int, int], ProcessUse] = {}
        self._ended: dict[str, float] = defaultdict(float)

    def collect(self) -> Iterator[Metric]:
        """Yields one sample per role; seconds of processes that have ended are kept in their role's."""
        now = self.read()
        for key in self._seen.keys() - now.keys():
            self._ended[self._seen[key].role] += self._seen[key].seconds
        self._seen = now
        if not now:
            return
        count = GaugeMetricFamily("vllm:server_processes", "processes of this server", labels=("role",))
        memory = GaugeMetricFamily("vllm:server_resident_memory_bytes", "resident memory", labels=("role",))
        cpu = CounterMetricFamily("vllm:server_cpu_seconds", "user and system CPU time", labels=("role",))
        known = (self._role, *ROLES.values())
        for role in (*known, *sorted({*self._ended, *(use.role for use in now.values())} - {*known})):
            some = [use for use in now.values() if use.role == role]
            count.add_metric((role,), len(some))
            memory.add_metric((role,), sum(use.resident for use in some))
            cpu.add_metric((role,), self._ended[role] + sum(use.seconds for use in some))
        yield from (count, memory, cpu)

    def read(self) -> dict[tuple[int, int], ProcessUse]:
        """Returns every process by its id and start time, since ids are reused."""
        found: dict[tuple[int, int], ProcessUse] = {}
        left = [self._root]
        while left:
            pid = left.pop()
            folder = self._proc / str(pid)
            try:
                # The name in parentheses may contain anything, so fields are counted after it.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                resident = int((folder / "statm").read_text().split()[1]) * _PAGE
                role = self._role if pid == self._root else get_role((folder / "cmdline").read_bytes())
                left += self._list_children(folder)
            except (OSError, IndexError, ValueError):
                continue  # the process has ended meanwhile
            found[pid, int(fields[19])] = ProcessUse(role, (int(fields[11]) + int(fields[12])) / _TICKS, resident)
        return found

    def _list_children(self, folder: Path) -> list[int]:
        """Returns the children of all threads of a process: the kernel lists each under the thread that started it."""
        found: list[int] = []
        for thread in (folder / "task").iterdir():
            try:
                found += map(int, (thread / "children").read_text().split())
            except OSError:
                continue
        return found


def get_role(command: bytes) -> str:
    """Returns the role of a process from its command line in /proc."""
    words = command.decode(errors="replace").split("\0")
    if API_MODULE in words[:-2]:
        return f"{API}-{words[words.index(API_MODULE) + 2]}"
    return next((role for module, role in ROLES.items() if module in words), OTHER)


class LogCollector(Collector):
    """``vllm:log_lines_dropped`` of this process."""

    def collect(self) -> Iterator[Metric]:
        """The counter as it is now."""
        queue = find_log_queue()
        family = CounterMetricFamily("vllm:log_lines_dropped", "lines of log that nothing read in time")
        family.add_metric((), 0 if queue is None else queue.dropped)
        yield family
