"""What pipeline stages add to the report of ``trencadis plan``: each stage's ledger, what crosses, and who waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trencadis.core.buckets import Stage, padded_tokens
from trencadis.core.errors import StartupError
from trencadis.core.launches.pipe import crossing
from trencadis.core.startup.dry_run import Planned


def pipeline_report(plans: Sequence[Planned], nodes: int, batch: int) -> dict[str, Any]:
    """The report as plain values; sizes in bytes.

    Args:
        nodes: machines, each with as many ranks.
        batch: requests that decode at a time; 0: as many as a server takes.

    Raises:
        StartupError: the ranks cannot be dealt to so many machines.
    """
    first, stages, ranks = plans[0], len(plans), plans[0].sized.ranks
    if stages * ranks % nodes:
        raise StartupError(f"--nodes {nodes} does not divide {stages * ranks} ranks; each node has as many.")
    here = stages * ranks // nodes
    rows = min(batch or first.limits.max_rows, first.limits.max_rows)
    lanes = min(stages, rows)
    decode, prefill = -(-rows // stages), first.limits.max_tokens
    return {
        "stages": [stage(planned, i * ranks // here) for i, planned in enumerate(plans)],
        "crossing": {
            "decode": {"tokens": decode, "bytes": crossing_bytes(first, decode)},
            "prefill": {"tokens": prefill, "bytes": crossing_bytes(first, prefill)},
            "links": ranks * (stages - 1),
            "over_nodes": sum(ranks for i in range(stages - 1) if (i + 1) * ranks // here != i * ranks // here),
        },
        "batch": rows,
        "steps_in_flight": lanes,
        "bubble": round(bubble(plans, rows), 4),
        "ranks_of_a_node": here,
    }


def stage(planned: Planned, node: int) -> dict[str, Any]:
    """One stage: its layers, its machine, its ledger."""
    share, ledger = planned.sized.model.share, planned.ledger
    return {
        "stage": share.stage,
        "node": node,
        "layers": [share.first, share.stop],
        "holds": [name for name, here in (
            ("tower", planned.sized.model.sees), ("embedding", share.starts), ("head", share.ends)
        ) if here],
        "ledger": [{"name": name, "bytes": count} for name, count in ledger.rows()],
        "total": ledger.before.total,
        "kv_blocks": ledger.division.blocks,
        "graphs": sum(len(taken) for taken in planned.selection.taken.values()),
        "weights_read": weights_read(planned),
    }  # fmt: skip


def crossing_bytes(planned: Planned, tokens: int) -> int:
    """Bytes that one rank hands to the next stage in a step of ``tokens`` tokens, padding included.

    A step of decoding rows is one launch; a longer one may be cut into more, which hold at least as many tokens.
    """
    t, plan, most = planned.sized.text, planned.plan, max(planned.limits.max_tokens, planned.limits.max_rows)
    fitting = [b for b in plan.of(Stage.DECODE) if padded_tokens(b) >= tokens] if tokens <= most else []
    rows = min((crossing(b, most) for b in fitting), default=tokens)
    return rows * t.hidden * planned.sized.itemsize


def weights_read(planned: Planned) -> int:
    """Bytes of weights that a decoding step reads on one device; the tower and the embedding's table are not read."""
    sized, share = planned.sized, planned.sized.model.share
    t, total = sized.text, sized.weights()
    if share.starts and not (share.ends and t.tied and sized.ranks == 1):
        total -= t.vocab * t.width * sized.itemsize
    if sized.model.sees and sized.model.vision is not None:
        total -= sized.model.vision.held(sized.ranks, sized.model.aligned(sized.unit)) * sized.itemsize
    return max(total, 1)


def bubble(plans: Sequence[Planned], rows: int) -> float:
    """The share of all stages' time in which they wait, in steps of ``rows`` decoding requests.

    A stage takes as long as it reads its weights. With at least a request a stage the longest stage never waits; with
    fewer, a step starts when an earlier one has left the last stage.
    """
    times = [weights_read(p) for p in plans]
    turn = max(max(times), sum(times) / min(len(times), rows))
    return 1 - sum(times) / (len(times) * turn)
