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
        assert "on another rank" in failed[bucket] and "outofdevicememory" in failures[bucket].lower()
        assert str(bucket) not in names
        close(answer, conversation)
        close(reply, conversation)
        lost.append(bucket)
    assert len(set(lost)) == -(-len(two_ranks.BUCKETS) // every)


@pytest.mark.parametrize("form", ["functional", "eager"])
def test_a_compiled_part_sums_in_both_forms(form: str, tmp_path: Path) -> None:
    """Functional: Dynamo's own operations; eager: one operation that Dynamo does not look into, and equal sums."""
    from trencadis.backends.hpu import hccl_comm

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        bridge: Any = SimpleNamespace(
            is_lazy=lambda: False, all_reduce=collectives.all_reduce, all_gather=collectives.all_gather,
            opaque_collectives=collectives.register_opaque,
        )  # fmt: skip
        cfg: Any = SimpleNamespace(rank=0, world=2, stages=1)
        comm = hccl_comm.HpuComm(bridge, cfg, opaque=form == "eager")
        assert comm.form == form
        x = torch.arange(6.0).reshape(3, 2)
        sum_rows = torch.compile(lambda x: comm.all_reduce(x * 2) + 1, backend=backend, fullgraph=True)
        assert torch.equal(sum_rows(x), x * 2 + 1)
    finally:
        torch.distributed.destroy_process_group()
    ours = any("trencadis_hpu" in name for name in seen)
    assert ours is (form == "eager"), seen


@pytest.mark.parametrize("fault", ["", "refused", "late", "wrong"])
def test_collectives_that_no_compiled_graph_has_run_between_graphs(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a card whose compiler refuses Dynamo's own collectives, at once or later, or makes them wrong."""
    from trencadis.backends.hpu import hccl_comm

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        if not fault or not any("c10d" in name or "all_reduce" in name for name in names if "trencadis" not in name):
            return graph.forward
        if fault == "refused":
            raise NotImplementedError("all_reduce")

        def run(*args: Any) -> Any:
            if fault == "late":
                raise RuntimeError("Exception in Lowering thread...\nGraph compile failed.")
            return [out * 0 for out in graph.forward(*args)]

        return run

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(collectives, "_stage", None)
    try:
        bridge: Any = SimpleNamespace(
            is_lazy=lambda: False, all_reduce=collectives.all_reduce, all_gather=collectives.all_gather,
            opaque_collectives=collectives.register_opaque, device=torch.device("cpu"),
            compile=lambda run: torch.compile(run, backend=backend, fullgraph=True, dynamic=False),
        )  # fmt: skip
        comm = hccl_comm.HpuComm(bridge, SimpleNamespace(rank=0, world=2, stages=1))  # type: ignore[arg-type]
        find_fault = hccl_comm.find_fault  # over as many ranks as there are
        monkeypatch.setattr(hccl_comm, "find_fault", lambda bridge, rank, world: find_fault(bridge, rank, 1))
        with caplog.at_level("WARNING", "trencadis.engine"):
            comm.check_compiled()
        assert comm.form == ("eager" if fault else "functional"), "the form that runs is what a benchmark names"
        x = torch.arange(6.0).reshape(3, 2)
        assert torch.equal(bridge.compile(lambda x: comm.all_reduce(x * 2) + 1)(x), x * 2 + 1)
    finally:
        torch.distributed.destroy_process_group()
    said = [record.getMessage() for record in caplog.records if record.name == "trencadis.engine"]
    assert len(said) == bool(fault) and all("cannot be used" in text and "\n" not in text for text in said)
