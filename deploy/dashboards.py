"""Writes deploy/grafana/*.json from tables of panels: python deploy/dashboards.py [--check]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "grafana"
WHO = 'model_name=~"$model"'
WIDTH, HEIGHT = 12, 8


class Panel(NamedTuple):
    """One graph: its expressions with their legends."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def rate(name: str, by: str = "") -> str:
    """Events a second of a counter, summed over what ``by`` does not name."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{WHO}}}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """A ratio of two counters; none where nothing happened."""
    return f"{rate(part)} / ({rate(whole)} > 0)"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """The median and the slow end of a histogram."""
    by = f"sum by (le) (rate({name}_bucket{{{WHO}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {by})", f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99))


def gauge(name: str, legend: str) -> tuple[str, str]:
    """A gauge as it is."""
    return (f"{name}{{{WHO}}}", legend)


REQUESTS = (
    Panel("Requests", "short", (
        gauge("vllm:num_requests_running", "running"), gauge("vllm:num_requests_waiting", "waiting"))),
    Panel("Ended requests", "reqps", ((rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),)),
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
    Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
    Panel("In the queue", "s", quantiles("vllm:request_queue_time_seconds")),
    Panel("Tokens", "short", (
        (rate("vllm:prompt_tokens_total"), "prompt"), (rate("vllm:generation_tokens_total"), "generated"),
        (rate("vllm:image_tokens_total"), "of images"))),
    Panel("Found in caches", "percentunit", (
        (share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "tokens of prefixes"),
        (share("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"), "encoded images"))),
    Panel("Turned away", "reqps", ((rate("vllm:admission_rejections_total", "reason"), "{{reason}}"),)),
    Panel("HTTP answers", "reqps", (
        ("sum by (status) (rate(http_requests_total[$__rate_interval]))", "{{status}}"),)),
    Panel("Tokens by tenant", "short", (
        ("sum by (tenant) (rate(vllm:tenant_tokens_total[$__rate_interval]))", "{{tenant}}"),)),
    Panel("Limits reached by tenant", "reqps", (
        ("sum by (tenant, limit) (rate(vllm:tenant_rejected_total[$__rate_interval]))", "{{tenant}} {{limit}}"),)),
)  # fmt: skip

SHAPES = (
    Panel("KV cache", "percentunit", (gauge("vllm:kv_cache_usage_perc", "in use"),)),
    Panel("Image arena", "percentunit", (gauge("vllm:encoder_cache_usage_perc", "in use"),)),
    Panel("Caches", "bytes", (gauge("vllm:cache_bytes", "{{cache}}"),)),
    Panel("Preemptions", "short", ((rate("vllm:num_preemptions_total"), "a second"),)),
    Panel("Padded share of the work", "percentunit", (
        (f"1 - {rate('vllm:graph_bucket_real_tokens_total', 'stage')} / "
         f"({rate('vllm:graph_bucket_padded_tokens_total', 'stage')} > 0)", "{{stage}}"),)),
    Panel("Launches without a graph", "short", (
        (rate("vllm:graph_bucket_misses_total", "stage, reason"), "{{stage}} {{reason}}"),)),
    Panel("Bytes of graphs", "bytes", (gauge("vllm:graph_bytes", "{{pool}}"),)),
    Panel("Compilations while serving", "short", (
        (rate("vllm:lazy_compiles_total"), "first use"), (rate("vllm:recompiles_total"), "again"))),
    Panel("Warm-up", "percentunit", (gauge("vllm:warmup_progress", "{{phase}}"),)),
    Panel("Tokens of a step", "short", quantiles("vllm:iteration_tokens_total")),
    Panel("Images of a vision launch", "short", quantiles("vllm:encoder_images_per_launch")),
    Panel("Restarts of the engine", "short", (gauge("vllm:engine_restarts_total", "restarts"),)),
    Panel("State of the engine", "short", (gauge("vllm:engine_sleep_state", "{{sleep_state}}"),)),
    Panel("Host memory", "bytes", (("sum by (role) (vllm:server_resident_memory_bytes)", "{{role}}"),)),
    Panel("Host CPUs", "short", (
        ("sum by (role) (rate(vllm:server_cpu_seconds_total[$__rate_interval]))", "{{role}}"),)),
)  # fmt: skip

BOARDS = {
    "requests": ("Trencadis: requests", REQUESTS),
    "shapes-and-memory": ("Trencadis: shapes and memory", SHAPES),
}


def board(uid: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """A dashboard in Grafana's form."""
    variable = {
        "name": "model", "type": "query", "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": {"query": "label_values(vllm:num_requests_running, model_name)", "refId": "model"},
        "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}, "refresh": 2,
    }  # fmt: skip
    return {
        "uid": f"trencadis-{uid}", "title": title, "schemaVersion": 41, "refresh": "10s", "tags": ["trencadis"],
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": [variable]},
        "panels": [graph(i, panel) for i, panel in enumerate(panels)],
    }  # fmt: skip


def graph(index: int, panel: Panel) -> dict[str, Any]:
    """A panel at its place, two in a row."""
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "id": index + 1, "type": "timeseries", "title": panel.title, "datasource": source,
        "gridPos": {"x": index % 2 * WIDTH, "y": index // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": expression, "legendFormat": legend, "datasource": source}
            for i, (expression, legend) in enumerate(panel.lines)
        ],
    }  # fmt: skip


def files() -> dict[Path, str]:
    """The boards' files and what they hold."""
    made = {uid: board(uid, title, panels) for uid, (title, panels) in BOARDS.items()}
    return {FOLDER / f"{uid}.json": json.dumps(value, indent=1) + "\n" for uid, value in made.items()}


def main(words: list[str]) -> int:
    """Writes the files; with ``--check`` returns 1 if they differ."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if words == ["--check"]:
        print("\n".join(f"{path.name} is out of date: run deploy/dashboards.py" for path in stale))
        return int(bool(stale))
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
