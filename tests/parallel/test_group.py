"""Ranks as processes: what they are told, and how each kind of failure ends the group, soon and with its cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import ranks as fake_ranks
from tests.fakes.ranks import full_step
from trencadis.assets import demo_path
from trencadis.backends.cpu.gloo_comm import GlooComm
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rendezvous
from trencadis.core.executor.multiproc_executor import MultiprocExecutor, RankDied, RankFailed
from trencadis.core.executor.rank_info_and_fingerprint import can_share, check_size, threads_of
from trencadis.core.executor.rank_launcher import LocalLauncher
from trencadis.core.links import message_link
from trencadis.core.process import child_process_environment_and_exit
from trencadis.core.process.child_process_environment_and_exit import RANK_FOLDER

FACTORY = "tests.fakes.ranks:make"
SOON = 5.0
"""Seconds in which a failure must be known: it settles for 0.3."""


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiprocExecutor]]:
    made: list[MultiprocExecutor] = []

    def make(mode: str = "", overlaps: bool = False) -> MultiprocExecutor:
        config = EngineConfig(policy=mode, tensor_parallel_size=3, async_depth=int(overlaps))
        made.append(MultiprocExecutor(config, FACTORY))
        made[-1].start(lambda place: fake_ranks.make(config, place))
        return made[-1]

    yield make
    for one in made:
        one.close()
        launcher = one._launcher
        assert isinstance(launcher, LocalLauncher) and not launcher.folder.exists()
        assert all(isinstance(c.process, subprocess.Popen) and c.process.returncode is not None for c in one.children)


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_rank_gets_the_same_steps_in_order(group: Any, overlaps: bool) -> None:
    """Digests of the frames, pieces of warm-up counted in, must agree: else the group ends."""
    ranks = group(overlaps=overlaps)
    ranks.submit(full_step(0)).result()
    assert ranks.warm().result().done == 1
    outputs = [ranks.submit(full_step(n)) for n in range(1, 30)]
    assert [o.result().number for o in outputs] == list(range(1, 30))
    end = time.monotonic() + SOON
    while ranks._digests:
        assert time.monotonic() < end, "a rank did not answer"
        time.sleep(0.01)
    assert ranks._failure is None


@pytest.mark.parametrize(
    ("mode", "overlaps", "words"),
    [
        ("raise@1", False, "rank 1: ValueError: out of luck"),
        ("late@2", True, "rank 2: ValueError: too late"),
        ("kill@2", True, "rank 2 died: killed by SIGKILL"),
        ("differ@0", False, "other tokens in step 3"),
        ("plan@1", True, "step 3 than other ranks, or by another plan"),
    ],
)
def test_a_rank_that_fails_ends_the_group(group: Any, mode: str, overlaps: bool, words: str) -> None:
    ranks = group(mode, overlaps)
    ranks.submit(full_step(2)).result()
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=words):
        for number in range(3, 10_000):
            ranks.submit(full_step(number)).result()
            time.sleep(0.005)
    with pytest.raises(RankFailed, match=words):
        ranks.submit(full_step(4)).result()
    assert time.monotonic() - begun < SOON
    assert all(child.process.wait(SOON) is not None for child in ranks.children)


@pytest.mark.parametrize("mode", ["raise@0", "late@0"])
def test_rank_0s_own_error_keeps_its_type(group: Any, mode: str) -> None:
    ranks = group(mode, overlaps=mode == "late@0")
    with pytest.raises(ValueError, match=r"out of luck|too late"):
        ranks.submit(full_step(3)).result()


def test_nobody_waits_for_a_collective_whose_partner_is_dead(group: Any) -> None:
    """Rank 0 sleeps, as it would in a collective that cannot end."""
    ranks = group("sleep@0")
    waiting = ranks.submit(full_step(3))
    ranks.children[0].process.kill()
    begun = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 died: killed by SIGKILL"):
        waiting.result()
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("refuse@2", StartupError, "^rank 2: there is no room for me$"),
        ("refuse@0", StartupError, "^there is no room for me$"),
        ("die@1", RankFailed, "rank 1 died: exit code 7"),
    ],
)
def test_a_start_up_that_fails_on_any_rank_fails(group: Any, mode: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        group(mode)


def test_a_rank_that_dies_in_a_capture_says_in_which(group: Any) -> None:
    with pytest.raises(RankDied, match="rank 2 died: killed by SIGKILL") as caught:
        group("capture@2")
    assert caught.value.capture == "decode[2]"
    with pytest.raises(RankDied) as caught:
        group("die@1")
    assert not caught.value.capture, "a capture that has ended is not to blame"


def test_a_stopped_rank_is_dead_after_seconds_and_a_busy_one_is_not(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process keeps its socket; its beats stop, while those of one that is within a step go on."""
    monkeypatch.setattr(message_link, "BEAT", 0.25)
    silence = message_link.MISSED_LOCALLY * message_link.BEAT
    ranks = group("sleep@1")
    for number in (0, 3):
        ranks.submit(full_step(number)).result()
    time.sleep(2 * silence)
    assert ranks._failure is None, "the step of rank 1 lasts, but it beats"
    ranks.children[1].process.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 5 * silence
    while ranks._failure is None:
        assert time.monotonic() < end, "nothing noticed the stopped rank"
        time.sleep(0.01)
    with pytest.raises(RankDied, match=r"rank 2 died: no sign of life for 2 s"):
        ranks.submit(full_step(4)).result()


def test_the_next_start_removes_what_killed_engines_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    prefix = RANK_FOLDER
    names = {f"{prefix}{gone.pid}-a": False, f"{prefix}{os.getpid()}-b": True,
             f"{prefix}{gone.pid}-new": True, f"{prefix}x-c": True, "other": True}  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
        if not name.endswith("new"):
            os.utime(tmp_path / name, (0, 0))
    launcher = LocalLauncher(EngineConfig(), 2)
    assert {name: (tmp_path / name).exists() for name in names} == names and launcher.folder.parent == tmp_path
    assert launcher.close in child_process_environment_and_exit.CLEANUPS
    launcher.close()
    assert not launcher.folder.exists() and launcher.close not in child_process_environment_and_exit.CLEANUPS


PARENT = """
import time
from tests.fakes import ranks as fake_ranks
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.rank_launcher import LocalLauncher
from trencadis.core.links import message_link
from trencadis.core.process import child_process_environment_and_exit
from trencadis.core.executor import rank_launcher
from trencadis.core.executor import rendezvous
from trencadis.core.executor.multiproc_executor import MultiprocExecutor
config = EngineConfig(policy="sleep@1", tensor_parallel_size=3)
ranks = MultiprocExecutor(config, "tests.fakes.ranks:make")
ranks.start(lambda place: fake_ranks.make(config, place))
print(ranks._launcher.folder, *(c.process.pid for c in ranks.children), flush=True)
ranks.submit(fake_ranks.full_step(3)).result()
time.sleep(3600)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ranks_end_with_a_killed_engine() -> None:
    """One of them sleeps in a step meanwhile."""
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    folder, *pids = parent.stdout.readline().split()
    assert len(pids) == 2 and not any(gone(int(p)) for p in pids) and Path(folder).stat().st_mode & 0o077 == 0
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + SOON
    while not all(gone(int(p)) for p in pids) or Path(folder).exists():
        assert time.monotonic() < end, "a rank outlived its engine"
        time.sleep(0.02)


def test_sums_have_the_same_bits_on_every_rank_and_in_every_row(tmp_path: Path) -> None:
    """Three ranks, so that the order of additions matters; each a thread with a group of its own."""
    world = 3
    parts = [torch.randn(1, 37, generator=torch.Generator().manual_seed(r)) for r in range(world)]

    def run(rank: int) -> Any:
        comm = GlooComm(BackendConfig(rank=rank, world=world, rendezvous=str(tmp_path / "store")))
        assert comm.least([rank, 5 - rank]) == (0, 3)
        assert comm.all_gather(parts[rank]).equal(torch.cat(parts, dim=1))
        small = comm.all_reduce(parts[rank].bfloat16())
        assert small.dtype == torch.bfloat16
        return comm.all_reduce(parts[rank].expand(50, -1)), small

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(run, range(world)))
    rows, small = found[0]
    assert all(other.equal(rows) and few.equal(small) for other, few in found)
    assert rows.equal((parts[0] + parts[1] + parts[2]).expand(50, -1)), "in the order of the ranks"
    exact = sum(p.bfloat16().double() for p in parts)
    torch.testing.assert_close(small.double(), exact, rtol=2**-8, atol=0)


def test_a_second_engine_of_ranks_does_not_wait_in_the_group_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one group: its other ranks would wait for rank 0, which is in that of the open engine."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "_joined", {"/tmp/first"})
    sizes = BackendConfig(max_tokens=1, max_rows=1, vocab_size=2, world=2)
    rendezvous.join_group(replace(sizes, rendezvous="/tmp/first"), "gloo")
    with pytest.raises(StartupError, match="close it first"):
        rendezvous.join_group(replace(sizes, rendezvous="/tmp/second"), "gloo")


def test_sizes_that_share_whole_heads() -> None:
    demo = load_config(demo_path())
    assert (demo.text.heads, demo.text.kv_heads) == (4, 2) and demo.vision is not None and demo.vision.heads == 4
    assert [w for w in range(10) if can_share(demo, w)] == [1, 2, 4]
    text = replace(demo, vision=None, text=replace(demo.text, heads=12))
    assert [w for w in range(20) if can_share(text, w)] == [1, 2, 4, 6, 12], "3 would give a rank heads of two KV heads"
    with pytest.raises(StartupError, match=r"size 3 does not divide .*12 query heads.*1, 2, 4, 6, 12"):
        check_size(text, 3)


def test_threads_are_divided() -> None:
    assert [threads_of(8, w) for w in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert threads_of(None, 1000) == 1
