"""Which CPUs threads are kept to: cores of one node first, ranks dealt to nodes, within affinity and quota."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from trencadis.backends.cpu.backend import CpuBackend
from trencadis.backends.cpu.native import kernel_threads
from trencadis.core.cpu_affinity import BIND, choose_cpus, nodes_of, parse_cpu_list, share_cpus
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError


def tree(root: Path, nodes: list[list[list[int]]]) -> tuple[Path, Path]:
    """/sys of a machine: for each node its cores, which are lists of CPUs."""
    cpus, held = root / "cpu", root / "node"
    for number, cores in enumerate(nodes):
        folder = held / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(str(cpu) for core in cores for cpu in core) + "\n")
        for core in cores:
            for cpu in core:
                (cpus / f"cpu{cpu}" / "topology").mkdir(parents=True)
                siblings = ",".join(str(one) for one in core)
                (cpus / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings + "\n")
    return cpus, held


TWO = [[[0, 8], [1, 9], [2, 10], [3, 11]], [[4, 12], [5, 13], [6, 14], [7, 15]]]


def test_a_core_is_one_cpu_of_its_node(tmp_path: Path) -> None:
    where = tree(tmp_path, TWO)
    assert nodes_of(range(16), *where) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert nodes_of([1, 8, 9, 12], *where) == ((1, 8), (12,)), "the second thread counts where the first is not ours"
    assert nodes_of([3, 4, 5, 6], *where) == ((4, 5, 6), (3,)), "the node with most cores comes first"
    assert nodes_of([2, 40], *where) == ((2,), (40,)), "a CPU that no node names"


def test_without_sys_each_cpu_is_a_core_of_one_node(tmp_path: Path) -> None:
    assert nodes_of([5, 2], tmp_path / "no", tmp_path / "none") == ((2, 5),)
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("nonsense")
    assert nodes_of([1, 2], tmp_path / "no", tmp_path) == ((1, 2),)


@pytest.mark.parametrize("counts", [(4,), (4, 4), (6, 2), (8, 8, 8, 8), (3, 3, 2), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_share_no_core_while_there_are_enough(counts: tuple[int, ...], ranks: int) -> None:
    first, nodes = 0, []
    for count in counts:
        nodes.append(tuple(range(first, first + count)))
        first += count
    given = [share_cpus(tuple(nodes), rank, ranks) for rank in range(ranks)]
    assert all(given)
    if ranks <= len(nodes):
        assert sorted(cpu for cpus in given for cpu in cpus) == list(range(first)), "whole nodes, each given once"
        assert all(set(node) <= set(cpus) or not set(node) & set(cpus) for node in nodes for cpus in given)
    else:
        assert all(any(set(cpus) <= set(node) for node in nodes) for cpus in given), "a rank stays on one node"
    if all(count >= -(-ranks // len(nodes)) for count in counts):
        assert len({cpu for cpus in given for cpu in cpus}) == sum(map(len, given))
    for rank, cpus in enumerate(given):
        kept = share_cpus(tuple(nodes), rank, ranks, reserved=1)
        assert kept == (cpus[:-1] or cpus)


NODES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "ranks", "threads", "nodes", "available", "found"),
    [
        ("auto", 1, 8, NODES, 8, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("", 1, 3, NODES, 16, [(0, 1, 2)]),
        ("auto", 2, 4, NODES, 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("auto", 4, 2, NODES, 8, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("auto", 1, 4, NODES, 4, [()]),  # a quota of 4 CPUs: others run there, too
        ("auto", 1, 16, NODES, 16, [()]),  # more threads than cores
        ("auto", 1, 4, NODES[:1], 4, [()]),  # one node
        ("nobind", 2, 4, NODES, 8, [(), ()]),
        ("0-2,9|4", 2, 4, NODES, 8, [(0, 1, 2, 9), (4,)]),
        ("5", 1, 4, NODES, 2, [(5,)]),
    ],
)
def test_threads_are_kept_where_it_helps_or_where_they_are_told(
    text: str,
    ranks: int,
    threads: int,
    nodes: tuple[tuple[int, ...], ...],
    available: int,
    found: list[tuple[int, ...]],
) -> None:
    assert [choose_cpus(text, 0, rank, ranks, threads, nodes, available) for rank in range(ranks)] == found


@pytest.mark.parametrize("text", ["some", "1-", "3-1", "0-3", "0|", "0-3|x"])
def test_a_list_that_serves_not_all_ranks_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=BIND):
        choose_cpus(text, 0, 1, 2, 4, NODES, 8)


def test_lists_of_cpus() -> None:
    assert parse_cpu_list("0-2,5,7-7\n") == (0, 1, 2, 5, 7) and parse_cpu_list("") == ()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_an_engines_threads_stay_on_the_cpus_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own, whose affinity is nobody else's."""
    usable, kept, found = sorted(os.sched_getaffinity(0)), list[Sequence[int]](), list[set[int]]()
    keep = kernel_threads.pin_threads

    def noted(cpus: Sequence[int]) -> None:
        kept.append(cpus)
        keep(cpus)
        found.append(os.sched_getaffinity(0))

    monkeypatch.setattr(kernel_threads, "pin_threads", noted)
    monkeypatch.setenv(BIND, str(usable[-1]))
    before, made = torch.get_num_threads(), list[str]()
    one = threading.Thread(target=lambda: made.append(CpuBackend(BackendConfig()).label))
    one.start()
    one.join(60)
    torch.set_num_threads(before)
    assert made == ["cpu (1 threads)"] and kept == [(usable[-1],)] and found == [{usable[-1]}]
    assert sorted(os.sched_getaffinity(0)) == usable
    monkeypatch.setenv(BIND, "4000")
    with pytest.raises(StartupError, match="that this process may not use"):
        CpuBackend(BackendConfig())
    monkeypatch.setenv(BIND, "nobind")
    CpuBackend(BackendConfig(options={"threads": str(before)}))
    assert len(kept) == 1
