"""The part of the report of ``trencadis plan`` about pipeline stages.

It has each stage's ledger, the bytes that are transferred between stages, and the idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trencadis.core.buckets import Stage, padded_tokens
from trencadis.core.errors import StartupError
from trencadis.core.launches.stage_transfer import transferred_rows
from trencadis.core.startup.dry_run import StartupPlan


def make_pipeline_report(plans: Sequence[StartupPlan], nodes: int, batch: int) -> dict[str, Any]:
    """Returns the report as plain values; sizes in bytes.

    Args:
        nodes: number of machines, all with the same number of ranks.
        batch: requests that decode at a time; 0: as many as a server takes.

    Raises:
        StartupError: the ranks cannot be divided among so many machines.
    """
    first, stages, ranks = plans[0], len(plans), plans[0].estimator.ranks
    if stages * ranks % nodes:
        raise StartupError(f"--nodes {nodes} does not divide {stages * ranks} ranks; each node has as many.")
    here = stages * ranks // nodes
    rows = min(batch or first.limits.max_rows, first.limits.max_rows)
    micro_batches = min(stages, rows)
    decode, prefill = -(-rows // stages), first.limits.max_tokens
    return {
        "stages": [describe_stage(planned, i * ranks // here) for i, planned in enumerate(plans)],
        "crossing": {
            "decode": {"tokens": decode, "bytes": stage_transfer_bytes(first, decode)},
            "prefill": {"tokens": prefill, "bytes": stage_transfer_bytes(first, prefill)},
            "links": ranks * (stages - 1),
            "over_nodes": sum(ranks for i in range(stages - 1) if (i + 1) * ranks // here != i * ranks // here),
        },
        "batch": rows,
        "steps_in_flight": micro_batches,
        "bubble": round(estimate_bubble(plans, rows), 4),
        "ranks_of_a_node": here,
    }


def describe_stage(planned: StartupPlan, node: int) -> dict[str, Any]:
    """Describes one stage: its layers, its machine, its ledger."""
    share, ledger = planned.estimator.model.share, planned.ledger
    return {
        "stage": share.stage,
        "node": node,
        "layers": [share.first, share.stop],
        "holds": [name for name, here in (
            ("tower", planned.estimator.model.encodes_images), ("embedding", share.starts), ("head", share.ends)
        ) if here],
        "ledger": [{"name": name, "bytes": count} for name, count in ledger.rows()],
        "total": ledger.memory_in_use.total,
        "kv_blocks": ledger.memory_split.blocks,
        "graphs": sum(len(taken) for taken in planned.selection.taken.values()),
        "weights_read": count_weight_bytes_read(planned),
    }  # fmt: skip


def stage_transfer_bytes(planned: StartupPlan, tokens: int) -> int:
    """Returns the bytes that one rank sends to the next stage in a step of ``tokens`` tokens, including padding.

    A step of decoding rows is one launch; a longer one may be cut into more, which have at least as many tokens.
    """
    t, plan, most = planned.estimator.text, planned.plan, max(planned.limits.max_tokens, planned.limits.max_rows)
    fitting = [b for b in plan.of(Stage.DECODE) if padded_tokens(b) >= tokens] if tokens <= most else []
    rows = min((transferred_rows(b, most) for b in fitting), default=tokens)
    return rows * t.hidden * planned.estimator.itemsize


def count_weight_bytes_read(planned: StartupPlan) -> int:
    """Returns the bytes of weights that a decoding step reads on one device; the tower and the embedding table are not
    read.
    """
    sized, share = planned.estimator, planned.estimator.model.share
    t, total = sized.text, sized.weights()
    if share.starts and not (share.ends and t.tied and sized.ranks == 1):
        total -= t.vocab * t.width * sized.itemsize
    if sized.model.encodes_images and sized.model.vision is not None:
        total -= (
            sized.model.vision.count_rank_weights(sized.ranks, sized.model.alignment_unit(sized.unit)) * sized.itemsize
        )
    return max(total, 1)


def estimate_bubble(plans: Sequence[StartupPlan], rows: int) -> float:
    """Returns the share of all stages' time in which they wait, in steps of ``rows`` decoding requests.

    The time of a stage is that of reading its weights. With at least one request per stage the longest stage never
    waits; with fewer, a step starts when an earlier one has left the last stage.
    """
    times = [count_weight_bytes_read(p) for p in plans]
    period = max(max(times), sum(times) / min(len(times), rows))
    return 1 - sum(times) / (len(times) * period)
