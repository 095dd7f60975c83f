"""The report of ``bench serve``: printed lines, and the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.server.bench.bench_metrics import DETAILS, TITLES

WIDTH = 50
NAMED = 10
"""Maximum kinds of failures that are listed."""
LATE_SHARE = 0.05


def format_lines(args: argparse.Namespace, found: JsonObject) -> Iterator[str]:
    """Yields the lines of the report, in vLLM's wording."""
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield _format_line("Successful requests:", found["completed"])
    yield _format_line("Failed requests:", found["failed"])
    if args.max_concurrency:
        yield _format_line("Maximum request concurrency:", args.max_concurrency)
    if not math.isinf(args.request_rate):
        yield _format_line("Request rate configured (RPS):", float(args.request_rate))
    yield _format_line("Benchmark duration (s):", found["duration"])
    yield _format_line("Total input tokens:", found["total_input_tokens"])
    yield _format_line("Total generated tokens:", found["total_output_tokens"])
    yield _format_line("Request throughput (req/s):", found["request_throughput"])
    if args.goals:
        yield _format_line("Request goodput (req/s):", found["request_goodput"])
    yield _format_line("Output token throughput (tok/s):", found["output_throughput"])
    yield _format_line("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"])
    yield _format_line("Peak concurrent requests:", float(found["max_concurrent_requests"]))
    yield _format_line("Total token throughput (tok/s):", found["total_token_throughput"])
    for name in args.metrics:
        short, title = TITLES[name]
        yield f"{title:-^{WIDTH}}"
        yield _format_line(f"Mean {short} (ms):", found[f"mean_{name}_ms"])
        yield _format_line(f"Median {short} (ms):", found[f"median_{name}_ms"])
        for p in args.percentiles:
            yield _format_line(f"P{p:g} {short} (ms):", found[f"p{p:g}_{name}_ms"])
    yield f"{'This client':-^{WIDTH}}"
    yield _format_line("CPU a piece of a stream (us):", found["client_cpu_us_per_piece"])
    yield _format_line("Median lateness (ms):", found["client_loop_lag_p50_ms"])
    yield _format_line("P99 lateness (ms):", found["client_loop_lag_p99_ms"])
    yield "=" * WIDTH


def _format_line(label: str, value: float) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{label:<40} {shown}"


def format_failures(errors: Sequence[str]) -> Iterator[str]:
    """Yields a line for each kind of failure, with its count."""
    counted = Counter(error for error in errors if error)
    for error, count in counted.most_common(NAMED):
        yield f"failed, {count} times: {error}"
    if len(counted) > NAMED:
        yield f"failed, {len(counted) - NAMED} further kinds"


def format_client_delay(found: JsonObject) -> str:
    """Returns a warning if this client, or its machine, was late enough to affect the figures; else ""."""
    late, pace = found["client_loop_lag_p99_ms"], found.get("median_tpot_ms") or found.get("median_ttft_ms") or 0.0
    if not pace or late < LATE_SHARE * pace:
        return ""
    what = f"this client was up to {late:.1f} ms late (p99), beside {pace:.1f} ms of what it measured"
    return f"warning: {what}; run it on a quieter machine, or with less load."


def make_result_object(args: argparse.Namespace, found: JsonObject, model: str, tokenizer: str) -> JsonObject:
    """Returns the JSON object of a run."""
    made: JsonObject = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": args.num_prompts,
        **args.more,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness if math.isfinite(args.burstiness) else "inf",
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy:
        made |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    made |= found
    if not args.save_detailed:
        for name in DETAILS:
            made.pop(name, None)
    return made


def make_result_path(args: argparse.Namespace, model: str, date: str) -> Path:
    """Returns the path of the result file."""
    folder = Path(args.result_dir or ".").expanduser()
    if args.result_filename:
        return folder / str(args.result_filename)
    most = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    rate = f"{args.request_rate}qps"
    if args.ramp_up_strategy:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps}qps-{args.ramp_up_end_rps}qps"
    return folder / f"{args.label or args.backend}-{rate}{most}-{model.rstrip('/').split('/')[-1]}-{date}.json"


def save(path: Path, made: JsonObject, append: bool) -> None:
    """Writes the JSON file, or appends a line to it.

    Raises:
        StartupError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(made)
        if append and path.exists() and path.stat().st_size:
            text = "\n" + text
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}.") from None
