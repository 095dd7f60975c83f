"""Writes docs/metrics.md from the registry of a server: python tools/pages/gen_metrics.py [--check]"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from prometheus_client import CollectorRegistry, Metric  # noqa: E402

from trencadis.core.engine_config import EngineConfig  # noqa: E402
from trencadis.core.engine_stats import BucketUse, EngineInfo, EngineStats, GraphCounters  # noqa: E402
from trencadis.core.startup_progress_and_warmup_pacing import Warming  # noqa: E402
from trencadis.server.engine.engine_client_and_request_timing import EngineClient  # noqa: E402
from trencadis.server.metrics import process_tenant_and_sleep_collectors  # noqa: E402
from trencadis.server.metrics.process_tenant_and_sleep_collectors import (  # noqa: E402
    ROLES,
    LogCollector,
    ProcessesCollector,
    SleepCollector,
    TenantCollector,
    TraceCollector,
)
from trencadis.server.metrics.prometheus import PrometheusMetrics  # noqa: E402
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission  # noqa: E402
from trencadis.server.tenants.tenant_registry import TenantRegistry  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
HEAD = f"""\
# Metrics

<!-- Made by tools/pages/gen_metrics.py; a test holds it to a live scrape. -->

`GET /metrics` answers in Prometheus' format. Names and labels are vLLM's where vLLM has the figure, so boards and
alerts made for it carry over. A histogram has `_bucket`, `_sum` and `_count`, a summary the last two. Counters count
since the engine's start, as Prometheus expects of a process that may restart. All values lie in memory:
`PROMETHEUS_MULTIPROC_DIR` is not used.

Roles of processes are `api`, {", ".join(f"`{role}`" for role in ROLES.values())}
(with several API processes `front`, and `api-0`, `api-1` and so on, [scaling.md](scaling.md)); their figures are read
from `/proc` while the scrape waits. Seconds of a process that has ended count up to the last scrape before its end.
"""
GROUPS = {
    "Requests": r"vllm:(request_|num_|time_to|inter_token|e2e|iteration|prompt_|generation_|image_tok)",
    "Caches and memory": r"vllm:(kv_|prefix_|mm_|encoder_|cache_|images_enc)",
    "Speculation": r"vllm:spec_decode_",
    "Shapes and graphs": r"vllm:(graph_|bucket_|padding|recompiles|lazy_|warmup|device_info)",
    "Admission and tenants": r"vllm:(admission|tenant|media_err)",
    "The server": r"vllm:(engine_|sleep_|server_|traces_|log_|cpu_)",
    "HTTP": r"http_",
}
HIDDEN = "Names that vLLM has given up, with `--show-hidden-metrics`"
PYTHON = """\
## Python

`process_*` and `python_*` are those of prometheus-client, about the API process, or the front of several.
"""


def page() -> str:
    """The page."""
    registry = server_registry()
    families = sorted(registry.collect(), key=lambda f: f.name)
    old = {f"vllm:{name}" for name in process_tenant_and_sleep_collectors.DEPRECATED_NAMES}
    parts = [HEAD]
    left = [f for f in families if not f.name.startswith(("process_", "python_")) and f.name not in old]
    for title, pattern in GROUPS.items():
        some = [f for f in left if re.match(pattern, f.name)]
        left = [f for f in left if f not in some]
        parts.append(f"## {title}\n\n" + table(registry, some))
    assert not left, f"no group has {[f.name for f in left]}"
    parts.append(f"## {HIDDEN}\n\n" + table(registry, [f for f in families if f.name in old]))
    return "\n".join([*parts, PYTHON])


def table(registry: CollectorRegistry, families: list[Metric]) -> str:
    """A table of families."""
    rows = (row(registry, family) for family in families)
    return "\n".join(["| name | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


def row(registry: CollectorRegistry, family: Metric) -> str:
    """A table's row."""
    shown = family.name + ("_total" if family.type == "counter" else "")
    labels = ", ".join(f"`{n}`" for n in labels_of(registry, family))
    return f"| `{shown}` | {family.type} | {labels} | {_escaped(family.documentation)} |"


def labels_of(registry: CollectorRegistry, family: Metric) -> list[str]:
    """Labels of a family; what has no sample yet is asked for its labels."""
    names = [*getattr(registry._names_to_collectors.get(family.name), "_labelnames", ())]
    names += [n for sample in family.samples for n in sample.labels if n not in (*names, "le")]
    return list(dict.fromkeys(names))


def server_registry() -> CollectorRegistry:
    """The registry of a server that has every family: tenants, sleep, old names, and one launch of each kind."""
    info = EngineInfo("cpu", "float32", 4096, 16, 64, 1024, 128, kv_bytes=1 << 20, arena_bytes=1 << 20)
    graphs = GraphCounters(bytes={"text": 0}, warming=Warming("compile"), capture_seconds={"decode": 0.0})
    uses = [BucketUse("vision", 1, 1, 0.0, "vision[64]", "planned", miss="skip")]
    stats = EngineStats(buckets=uses, graphs=graphs)
    engine = SimpleNamespace(
        stats=stats, info=info, plan=None, restarts=0, observers=[], sleep_level=0, sleep_operation="", on_operation=[]
    )
    made = PrometheusMetrics("model", 4096, cast(EngineClient, engine), Admission(), config=EngineConfig(), hidden=True)
    made.on_stats(stats)
    made.registry.register(ProcessesCollector())
    made.registry.register(LogCollector())
    account = SimpleNamespace(used=_Zeros(), own=0, rejected={"concurrency": 0})
    made.registry.register(TenantCollector(cast(TenantRegistry, SimpleNamespace(accounts={"ann": account}))))
    SleepCollector(made.registry, cast(EngineClient, engine))
    made.registry.register(TraceCollector(SimpleNamespace(sent=0, dropped=0, cpu_seconds=0.0)))
    return made.registry


class _Zeros(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def rows(text: str) -> Iterator[tuple[str, set[str]]]:
    """Name and labels of each row of the page."""
    for name, labels in re.findall(r"^\| `([\w:]+)` \| \w+ \| (.*?) \|", text, re.MULTILINE):
        yield name, set(re.findall(r"`(\w+)`", labels))


def _escaped(text: str) -> str:
    """``text`` as a table's cell shows it."""
    return re.sub(r"([|<>*\[\]{}_])", r"\\\1", text)


def main(words: list[str]) -> int:
    """Writes the page; with ``--check`` returns 1 if it differs."""
    made = page()
    if words == ["--check"]:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made
        if not same:
            print("docs/metrics.md is out of date: run tools/pages/gen_metrics.py")
        return int(not same)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
