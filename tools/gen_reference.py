"""Writes reference pages of the site from the code itself: metrics, Python API, and the root's pages.

    python tools/gen_reference.py [FOLDER]

``docs/conf.py`` runs this at each build, into a folder that git ignores; nobody edits what it writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from prometheus_client import CollectorRegistry, Metric  # noqa: E402

import trencadis  # noqa: E402
from trencadis.core.progress import Warming  # noqa: E402
from trencadis.core.report import BucketUse, EngineInfo, EngineStats, GraphCounters  # noqa: E402
from trencadis.server.admission import Admission  # noqa: E402
from trencadis.server.engine.protocol import EngineClient  # noqa: E402
from trencadis.server.metrics.registry import Metrics  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
OWN_PAGES = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "reporting": "SECURITY.md"}
"""Pages of the site that are files of the repository's root."""


def _escaped(text: str) -> str:
    """``text`` as a table's cell shows it."""
    return re.sub(r"([|<>*\[\]{}_])", r"\\\1", text)


def metrics() -> str:
    """Every family that ``GET /metrics`` shows, read from the registry of a server."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` in Prometheus' format. Names are vLLM's where vLLM has the figure; a counter's name ends in",
        "`_total`, a histogram's in `_bucket`, `_sum` and `_count`.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    registry = _registry()
    for family in sorted(registry.collect(), key=lambda f: f.name):
        if not family.name.startswith(("process_", "python_")):  # prometheus-client's own
            lines.append(_family(registry, family))
    return "\n".join(lines) + "\n"


def _family(registry: CollectorRegistry, family: Metric) -> str:
    """A table's row; what has no sample yet is asked for its labels."""
    shown = family.name + ("_total" if family.type == "counter" else "")
    names = [*getattr(registry._names_to_collectors.get(family.name), "_labelnames", ())]
    names += [n for sample in family.samples for n in sample.labels if n not in (*names, "le")]
    labels = ", ".join(f"`{n}`" for n in dict.fromkeys(names))
    return f"| `{shown}` | {family.type} | {labels} | {_escaped(family.documentation)} |"


def _registry() -> CollectorRegistry:
    """The registry of a server whose engine has made one launch of each kind."""
    info = EngineInfo("cpu", "float32", 4096, 16, 64, 1024, 128, kv_bytes=1 << 20, arena_bytes=1 << 20)
    graphs = GraphCounters(bytes={"text": 0}, warming=Warming("compile", 0.0))
    uses = [BucketUse("vision", 1, 1, 0.0, "vision[64]", "planned", miss="skip")]
    stats = EngineStats(buckets=uses, graphs=graphs)
    engine = SimpleNamespace(stats=stats, info=info, restarts=0, observers=[])
    made = Metrics("model", 4096, cast(EngineClient, engine), Admission(), lambda: None)
    made.on_stats(stats)
    return made.registry


def python_api() -> str:
    """What ``from trencadis import ...`` offers, for autodoc to fill in."""
    lines = ["# Python API", "", "`from trencadis import ...` offers these names; anything else may move.", ""]
    lines += ["```{eval-rst}", ".. currentmodule:: trencadis", ""]
    for name in sorted(n for n in trencadis.__all__ if not n.startswith("_")):
        found = getattr(trencadis, name)
        kind = "data"
        if inspect.isclass(found):
            kind = "autoexception" if issubclass(found, BaseException) else "autoclass"
        elif callable(found):
            kind = "autofunction"
        lines.append(f".. {kind}:: {name}")
        lines += ["   :members:", ""] if kind.startswith(("autoclass", "autoexc")) else [""]
    return "\n".join([*lines, "```", ""])


def own_page(name: str) -> str:
    """A page of the root as one of the site: its links start from another folder."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](../").replace("](SECURITY.md)", "](reporting.md)")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
    # What the site does not hold is named and not linked: it does not know the repository's address.
    return re.sub(r"\[([^\]]+)\]\((?!https?:|\.\./|#|\w+\.md)[^)]+\)", r"\1", text)


def pages() -> dict[str, str]:
    """Every generated page by its name."""
    made = {"metrics": metrics(), "python-api": python_api()}
    return made | {name: own_page(file) for name, file in OWN_PAGES.items()}


def write(folder: Path = FOLDER) -> None:
    """Writes the pages that changed; the others keep their times, so that a build does not repeat them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        file = folder / f"{name}.md"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:2]))
