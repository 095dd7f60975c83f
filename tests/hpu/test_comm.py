"""Two ranks on two emulated cards over gloo: collectives in graphs, shards that add up, captures that all share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes import two_ranks
from trencadis.backends.hpu import collectives
from trencadis.backends.hpu.hccl_comm import HpuComm

ROOT = Path(__file__).resolve().parent.parent.parent


def run_ranks(tmp_path_factory: pytest.TempPathFactory, vl_checkpoint: Path, every: int) -> list[Any]:
    """What each of the two processes found; they check the collectives by themselves."""
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", "-m", "tests.fakes.two_ranks"]
    files = [folder / str(rank) for rank in range(2)]
    started = [
        subprocess.Popen([*command, str(r), folder / "store", vl_checkpoint, files[r], str(every)], env=env)
        for r in range(2)
    ]
    try:
        assert [process.wait(timeout=500) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [torch.load(f, weights_only=False) for f in files]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, vl_checkpoint: Path) -> list[Any]:
    return run_ranks(tmp_path_factory, vl_checkpoint, 2)


def test_an_engine_without_stages_leaves_the_group_of_one_with_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one process, one after the other; the group of the first is gone."""
    monkeypatch.setattr(torch.distributed, "new_group", lambda members=None, backend="": (members, backend))
    monkeypatch.setattr(collectives, "_stage", None)
    bridge: Any = SimpleNamespace(collective_backend="hccl")
    for stages, group in ((2, ([2, 3], "hccl")), (1, None)):
        cfg: Any = SimpleNamespace(rank=0, world=2, stages=stages, stage=stages - 1)
        HpuComm(bridge, cfg)
        assert collectives._stage == group


@pytest.mark.parametrize("width", [1, 3])
def test_rows_of_all_ranks_stand_side_by_side_in_memory(width: int) -> None:
    """A compiled launch takes them for contiguous."""
    parts = [torch.randn(4, width) for _ in range(2)]
    found = collectives.concat_columns(torch.cat(parts), 2)
    assert found.is_contiguous() and torch.equal(found, torch.cat(parts, 1))


def close(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_shards_add_up_to_the_whole(ranks: list[Any], vl_checkpoint: Path) -> None:
    """Text, images and sampling on two ranks equal one; KV heads, MLPs, the tower and the head are cut."""
    engine = two_ranks.Engine(0, 1, vl_checkpoint)
    manager, _ = engine.manager()
    whole = engine.talk(manager)
    for conversation, _, _ in ranks:
        close(conversation, whole)


@pytest.mark.parametrize("lazily", [False, True])
def test_memory_that_runs_out_on_one_of_two_ranks(ranks: list[Any], lazily: bool) -> None:
    """At every capture, or every other: both run that bucket uncaptured, have the same graphs and books, and answer
    as before."""
    same_without_memory(ranks, lazily, 2 if lazily else 1)


@pytest.mark.long
def test_memory_that_runs_out_at_every_first_use(tmp_path_factory: pytest.TempPathFactory, vl_checkpoint: Path) -> None:
    same_without_memory(run_ranks(tmp_path_factory, vl_checkpoint, 1), True, 1)


def same_without_memory(ranks: list[Any], lazily: bool, every: int) -> None:
    (conversation, *one), (_, *two) = ranks
    lost = []
    for (names, failed, spent, answer), (others, failures, same, reply) in zip(one[lazily], two[lazily], strict=True):
        assert names == others and spent == same and len(failed) == len(failures) == 1
        (bucket,) = failed
        assert "on another rank" in failed[bucket] and "out of memory" in failures[bucket].lower()
        assert str(bucket) not in names
        close(answer, conversation)
        close(reply, conversation)
        lost.append(bucket)
    assert len(set(lost)) == -(-len(two_ranks.BUCKETS) // every)
