"""A start-up beside ``trencadis plan`` of the same flags: ledger rows, buckets, KV blocks."""

from __future__ import annotations

from typing import Any

from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine.startup_plan import StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.server.plan.plan_command import make_plan

BEFORE = ("weights", "image arena", "sampler state", "hidden rows", "static inputs", "KV cache")


def on_paper(total: int, others: int = 0, **flags: Any) -> StartupPlan:
    config = EngineConfig(model=str(demo_path()), **flags)
    return make_plan(config, load_config(demo_path()), total, others)


def first_rank(llm: LLM) -> ModelRunner:
    rank: ModelRunner = llm.engine.executor._rank  # type: ignore[attr-defined]
    return rank


def booked(llm: LLM) -> dict[str, int]:
    """The ledger of the first rank of a start-up."""
    watch = llm.engine._watch
    assert watch is not None and watch.captures is not None
    return dict(watch.captures.ledger.rows())


def held(llm: LLM) -> dict[str, int]:
    """What the tensors of the first rank take, where no ledger is kept."""
    model: Any = first_rank(llm).model
    own, tower = model.persistent, model.tower
    text = model.enter.rotary
    tables = (text.inv_freq, text.axis, *tower.patch_embed.frequencies, *tower.patch_embed.scale_shift)
    return {
        "weights": model.nbytes() + sum(t.nbytes for t in tables),
        "image arena": own.arena.nbytes,
        "sampler state": sum(t.nbytes for t in own.state),
        "hidden rows": own.hidden.nbytes,
        "static inputs": 0,
        "KV cache": sum(t.nbytes for layer in own.kv for t in layer if t is not None),
    }


def assert_as_planned_on_the_cpu(llm: LLM, **flags: Any) -> None:
    """Each rank holds its heads, and one KV head where there are fewer; all share the machine."""
    planned = on_paper(64 << 30, 1 << 30, **flags)
    rows = dict(planned.ledger.rows())
    assert {n: rows[n] for n in BEFORE} == held(llm)
    assert planned.ledger.memory_split.blocks == llm.engine.info().num_blocks
    assert sum(rows.values()) == 64 << 30
    each = sum(rows[n] for n in BEFORE) + rows["activations and workspace"]
    ranks = flags.get("tensor_parallel_size", 1)
    assert rows["used by others"] == (1 << 30) + (ranks - 1) * each


def assert_as_planned_on_a_card(llm: LLM, **flags: Any) -> None:
    """Rows of the first rank's ledger, planned buckets and KV blocks."""
    rows, memory = booked(llm), first_rank(llm).backend.memory
    left_out = (384 << 20) if flags["device"] == "hpu" and flags.get("tensor_parallel_size", 1) > 1 else 0  # to HCCL
    planned = on_paper(memory.total() + left_out, **flags)
    paper = dict(planned.ledger.rows())
    assert planned.ledger.memory_in_use.total == memory.total()
    # The twin books what the backend asks for: packed weights, not the tables and norms that torch allocates.
    names = [n for n in BEFORE if flags["device"] == "hpu" or n != "weights"]
    assert {n: paper[n] for n in names} == {n: rows[n] for n in names}
    assert set(planned.plan.buckets) == set(first_rank(llm).graphs.planned)
    assert planned.ledger.memory_split.blocks == llm.engine.info().num_blocks
