"""The report of ``trencadis plan``: one dictionary, printed as JSON or as tables.

The part of the report of ``trencadis plan`` about pipeline stages.

It has each stage's ledger, the bytes that are transferred between stages, and the idle time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trencadis.core.buckets import Stage, padded_tokens
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.engine.startup_plan import StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.host_memory import gib
from trencadis.core.json_types import JsonObject
from trencadis.core.launches.pipeline_transfer import transferred_rows
from trencadis.core.memory.memory_division import POOLS
from trencadis.server.plan.trace_plan_comparison import Sizes

NAMED_SIZES = (
    (224, 224), (336, 336), (448, 448), (512, 512), (640, 480), (800, 600), (1024, 768), (1280, 720), (1344, 1008),
    (1920, 1080),
)  # fmt: skip
"""Width x height of the images whose shapes are listed."""

Report = JsonObject


def make_report(planned: StartupPlan, config: EngineConfig, model: ModelConfig, sizes: Sizes) -> Report:
    """Returns the report as plain values; sizes in bytes."""
    limits, division = planned.limits, planned.ledger.memory_split
    captured = {p.bucket for taken in planned.selection.taken.values() for p in taken}
    return {
        "model": model.name,
        "device": config.device,
        "ranks": planned.estimator.ranks,
        "limits": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_rows,
            "max_num_batched_tokens": limits.max_tokens,
            "block_size": limits.block_size,
        },
        "ledger": [{"name": name, "bytes": count} for name, count in planned.ledger.rows()],
        "host": [{"name": name, "bytes": count} for name, count in planned.host],
        "total": planned.ledger.memory_in_use.total,
        "usable": division.usable,
        "kv_blocks": division.blocks,
        "concurrency": round(planned.concurrency, 2),
        "pools": {
            pool: {"budget": division.pools()[pool], "planned": planned.selection.spent[pool]} for pool in POOLS
        },
        "buckets": {
            stage.name.lower(): [
                {
                    "dims": b.dims, "variant": b.variant, "captured": b in captured,
                    "bytes": next(p.alone for p in planned.prices if p.bucket == b),
                }
                for b in planned.plan.of(stage)
            ]
            for stage in Stage
            if planned.plan.of(stage)
        },
        "graphs": {"planned": len(planned.plan.buckets), "captured": len(captured)},
        "warmup_seconds": round(sum(planned.seconds.values()), 1),
        "images": list(describe_images(planned, sizes)) if model.vision is not None else [],
        "by_formula": list(planned.formula),
        "notes": list(planned.notes),
    }  # fmt: skip


def describe_images(planned: StartupPlan, sizes: Sizes) -> Iterator[JsonObject]:
    """Describes images of common sizes: patches as the Gaudi guide counts them (width x height / 14^2), and slots."""
    for width, height in NAMED_SIZES:
        made = sizes(height, width)
        # Tiles of one image may run in several launches.
        most = max(planned.plan.sizes(Stage.VISION), default=made.slots)
        need = made.slots if len(made.all_items) == 1 else min(made.slots, most)
        yield {
            "size": f"{width}x{height}",
            "resized": f"{made.resized[1]}x{made.resized[0]}",
            "patches": made.patches,
            "slots": made.slots,
            "tokens": made.tokens,
            "bucket": planned.plan.fit(Stage.VISION, (need,)).dims[0],
            "planned": planned.plan.is_within_boundaries(Stage.VISION, (need,)),
        }


def format_report(report: Report) -> str:
    """Formats the report as tables."""
    ledgers = _format_pipeline(report, report["pipeline"]) if "pipeline" in report else _format_ledger(report)
    parts = [_format_head(report), ledgers, _format_pools(report), _format_buckets(report)]
    if report["images"]:
        parts.append(_format_images(report["images"]))
    if "trace" in report:
        parts.append(_format_trace(report["trace"]))
    formulas = ", ".join(report["by_formula"])
    lines = [
        f"estimated by formula, not measured: {formulas}" if formulas else "all figures were measured",
        *report["notes"],
    ]
    if "profile" in report:
        lines.append(f"needs for --bucket-profile: {report['profile']}")
    if "plot" in report:
        lines.append(f"image: {report['plot']}")
    return "\n\n".join([*parts, "\n".join(lines)])


def _format_head(r: Report) -> str:
    limits = r["limits"]
    devices = f"{r['ranks']} x {r['device']}" if r["ranks"] > 1 else r["device"]
    return (
        f"{r['model']} on {devices}: length {limits['max_model_len']}, {limits['max_num_seqs']} requests, "
        f"{limits['max_num_batched_tokens']} tokens a step, blocks of {limits['block_size']}"
    )


def format_table(rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Formats aligned columns; the first ``left`` are left-aligned, the others right-aligned."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    lines = []
    for row in texts:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _format_ledger(r: Report) -> str:
    rows = [(row["name"], gib(row["bytes"]), f"{100 * row['bytes'] / r['total']:.1f} %") for row in r["ledger"]]
    rows.append(("total", gib(r["total"]), "100.0 %"))
    ends = f"KV cache: {r['kv_blocks']} blocks, {r['concurrency']} requests of the full length"
    return f"memory of one device (usable {gib(r['usable'])})\n{format_table(rows)}\n{ends}"


def _format_pipeline(r: Report, p: JsonObject) -> str:
    """Formats a column per stage, then transferred bytes and idle time."""
    stages = p["stages"]
    rows: list[tuple[object, ...]] = [("", *(f"stage {s['stage']}" for s in stages))]
    rows.append(("layers", *(f"{s['layers'][0]}..{s['layers'][1] - 1}" for s in stages)))
    rows.append(("beside them", *(" ".join(s["holds"]) or "-" for s in stages)))
    if p["ranks_of_a_node"] < r["ranks"] * len(stages):
        rows.append(("node", *(s["node"] for s in stages)))
    rows += [
        (name, *(gib(s["ledger"][i]["bytes"]) for s in stages))
        for i, name in enumerate(row["name"] for row in stages[0]["ledger"])
    ]
    rows.append(("total", *(gib(s["total"]) for s in stages)))
    crosses = p["crossing"]
    each = [f"{gib(crosses[kind]['bytes'])} for {crosses[kind]['tokens']} tokens" for kind in ("decode", "prefill")]
    over = f", {crosses['over_nodes']} of them between nodes" if crosses["over_nodes"] else ""
    lines = [
        f"memory of one device of each stage\n{format_table(rows)}",
        f"KV cache: {r['kv_blocks']} blocks, {r['concurrency']} requests of the full length",
        f"a step hands on {' or '.join(each)}, on each of {crosses['links']} links{over}",
        f"with {p['batch']} decoding requests {p['steps_in_flight']} steps are in flight, and stages wait "
        f"{100 * p['bubble']:.1f} % of the time",
    ]
    return "\n".join(lines)


def _format_pools(r: Report) -> str:
    if not any(p["budget"] for p in r["pools"].values()):
        return "graphs: the device captures none"
    rows: list[tuple[object, ...]] = [("pool", "budget", "graphs")]
    rows += [(name, gib(p["budget"]), gib(p["planned"])) for name, p in r["pools"].items()]
    return f"graph pools{_format_first_stage_note(r)}\n{format_table(rows)}"


def _format_buckets(r: Report) -> str:
    if not r["buckets"]:
        return "shapes: the device takes every size, nothing is padded"
    rows: list[tuple[object, ...]] = [("stage", "planned", "captured", "sizes")]
    for stage, found in r["buckets"].items():
        captured = sum(b["captured"] for b in found)
        axes = [sorted({b["dims"][i] for b in found}) for i in range(len(found[0]["dims"]))]
        rows.append((stage, len(found), captured, " x ".join(_format_sizes(a) for a in axes)))
    texts = [[str(c) for c in row] for row in rows]
    lines = [f"  {t[0]:<8}{t[1]:>8}{t[2]:>10}  {t[3]}" for t in texts]
    total = r["graphs"]
    ends = (
        f"{total['planned']} buckets, {total['captured']} captured; warm-up about {r['warmup_seconds'] / 60:.0f} min"
        f" (planned in {r['seconds_to_plan']} s)"
    )
    return f"shapes{_format_first_stage_note(r)}\n" + "\n".join(lines) + "\n" + ends


def _format_first_stage_note(r: Report) -> str:
    """Returns the addition to a heading if there are several stages."""
    return " of stage 0" if "pipeline" in r else ""


def _format_sizes(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes)) if len(sizes) <= 18 else f"{sizes[0]} {sizes[1]} .. {sizes[-1]} ({len(sizes)})"


def _format_images(images: Sequence[JsonObject]) -> str:
    rows: list[tuple[object, ...]] = [("image", "resized", "patches", "slots", "tokens", "bucket")]
    rows += [
        (i["size"], i["resized"], i["patches"], i["slots"], i["tokens"], f"{i['bucket']}{'' if i['planned'] else ' !'}")
        for i in images
    ]
    return (
        f"images (patches: width x height / 14^2; slots: what the tower computes; !: not planned)\n{format_table(rows)}"
    )


def _format_trace(trace: JsonObject) -> str:
    names = ("tokens", "blocks", "slots")
    shares = (f"{n} padded/real" for n in names)
    rows: list[tuple[object, ...]] = [
        ("plan", "graphs", *shares, "cost", "least", "time", "launches", "warm-up", "unplanned")
    ]
    for name, found in trace["plans"].items():
        shares = (f"{found[n] / trace['real'][n]:.3f}" if trace["real"][n] else "-" for n in names)
        rows.append(
            (
                name,
                found["graphs"],
                *shares,
                f"{found['cost'] / trace['real']['cost']:.4f}",
                f"{found['least_padding']:.4f}" if "least_padding" in found else "",
                f"{found['time']:.3f}",
                found["launches"],
                f"{found['warmup_seconds'] / 60:.1f} min",
                found["unplanned"],
            )
        )
    real = trace["real"]
    head = (
        f"trace: {trace['requests']} requests, {trace['steps']} steps, {real['tokens']} tokens, {real['slots']} slots"
    )
    return (
        f"{head}; cost is padded linear operations + attended pairs, over those of the real work; time is that of\n"
        "all launches by the device's formula, over this plan's; learned plans are chosen by this trace; no sizes of\n"
        "as many graphs reach less than `least`, unless prompts are cut into more launches\n"
        f"{format_table(rows)}"
    )


def make_pipeline_report(plans: Sequence[StartupPlan], nodes: int, batch: int) -> JsonObject:
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


def describe_stage(planned: StartupPlan, node: int) -> JsonObject:
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
