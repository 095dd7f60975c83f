"""What the benchmarks share: the machine's description, medians, tables, result files, and who else used the CPU."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil
else:
    try:
        import psutil
    except ModuleNotFoundError:  # a bare GPU machine
        psutil = None

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
RESULTS = BENCH / "results"
NOTED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
BUSY = 0.2
"""If other processes use more cores than this, the result is marked as disturbed."""

Row = Sequence[Any]


def environment() -> dict[str, str]:
    """Environment of a child process that runs this checkout's code with ``python -P -m``."""
    rest = os.environ.get("PYTHONPATH")
    # Installed packages have their bytecode; without, each start compiles every module.
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**others, "PYTHONPATH": str(ROOT) + (os.pathsep + rest if rest else "")}


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions and date: the context of every figure."""
    model, flags = "unknown", set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
    return {
        "cpu": model,
        "flags": [f for f in NOTED_FLAGS if f in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **{name: _version(name) for name in ("torch", "transformers")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def median(values: Iterable[float]) -> float:
    """The middle value; 0 if there are none."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def quantile(values: Iterable[float], q: float) -> float:
    """The value below which a share ``q`` of ``values`` lies (nearest rank); 0 if there are none."""
    found = sorted(values)
    return found[min(len(found) - 1, int(q * len(found)))] if found else 0.0


class Others:
    """CPU time that everything but this process and its children uses: how far a figure can be trusted.

    Without psutil it says 0.
    """

    def __init__(self) -> None:
        self.begun, self.cpu = time.monotonic(), _foreign()

    def cores(self) -> float:
        """Mean number of cores that others used since construction."""
        return round(max(0.0, (_foreign() - self.cpu) / max(1e-9, time.monotonic() - self.begun)), 2)


def _foreign() -> float:
    if psutil is None:
        return 0.0
    t = psutil.cpu_times()
    mine = 0.0
    process = psutil.Process()
    for p in (process, *process.children(recursive=True)):
        try:
            c = p.cpu_times()
        except psutil.Error:
            continue
        mine += c.user + c.system + c.children_user + c.children_system
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal) - mine


def table(header: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; floats with three significant digits."""
    cells = [[_cell(c) for c in r] for r in (header, *rows)]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def save(name: str, result: dict[str, Any]) -> Path:
    """Writes ``.bench/results/NAME.json``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def report(name: str, result: dict[str, Any], text: str) -> None:
    """Saves ``result`` with the machine's description and prints it as a table."""
    result = {"benchmark": name, "machine": machine(), **result, "table": text}
    m = result["machine"]
    print(f"\n{name}: {m['cpu']} ({', '.join(m['flags'])}), {m['cores']} cores, torch {m['torch']}, {m['date']}")
    if result.get("others_cores", 0.0) > BUSY:
        print(f"DISTURBED: other processes used {result['others_cores']} cores meanwhile")
    print(f"\n{text}\n\nwritten to {save(name, result).relative_to(ROOT)}", flush=True)
