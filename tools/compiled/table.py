"""What ``tools/kernel_resources.py`` compiled, as a data file (docs/kernels.csv) and a section of docs/cuda.md."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.compiled.assembly import EXCHANGED, GUARDED, NO_WAIT, STAGED, UNGUARDED
from tools.compiled.digests import Known

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs" / "kernels.csv", ROOT / "docs" / "cuda.md"


@dataclass(frozen=True)
class Card:
    """Limits of one streaming multiprocessor; bytes of shared memory that one program may take, and that there are."""

    shared: int
    shared_all: int
    warps: int
    programs: int


CARDS = {
    80: Card(163 << 10, 164 << 10, 64, 32),
    86: Card(99 << 10, 100 << 10, 48, 16),
    89: Card(99 << 10, 100 << 10, 48, 24),
    90: Card(227 << 10, 228 << 10, 64, 32),
    100: Card(227 << 10, 228 << 10, 64, 32),
    120: Card(99 << 10, 100 << 10, 48, 24),
}
REGISTERS = 65536


@dataclass(frozen=True)
class Report:
    """What one kernel needs on one architecture; ``error``: it does not compile.

    ``wait``: what stands between a wait for a product by warp groups and the next write of shared memory
    (``tools.compiled.assembly.guard``); empty: not read. ``trip``: instructions of a trip of its loop; 0: none or
    unknown.
    """

    case: str
    kernel: str
    arch: int
    registers: int = 0
    stack: int = 0
    shared: int = 0
    warps: int = 0
    stages: int = 0
    constants: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    key: str = ""
    wait: str = ""
    trip: int = 0

    @property
    def fits(self) -> bool:
        """Whether one program fits the shared memory."""
        return not self.error and self.shared <= CARDS[self.arch].shared

    @property
    def occupancy(self) -> float:
        """Share of the warps that a multiprocessor can hold."""
        card = CARDS[self.arch]
        if not self.fits or not self.registers:
            return 0.0
        a_warp = -(-self.registers // 8) * 8 * 32
        held = min(REGISTERS // (a_warp * self.warps), card.warps // self.warps, card.programs)
        if self.shared:
            held = min(held, card.shared_all // (self.shared + 1024))
        return held * self.warps / card.warps


FIELDS = (
    "kernel", "case", "arch", "tile", "warps", "stages", "registers", "stack", "shared_kib", "held", "error", "triton",
    "key", "wait", "trip",
)  # fmt: skip
Row = dict[str, str]

BEGIN, END = "<!-- made by tools/kernel_resources.py -->", "<!-- end of the table -->"
HEAD = """## Kernels

What the CUDA kernels need, compiled ahead of time without a GPU. Each compilation is a line of
[kernels.csv](kernels.csv): tile, warps and stages; registers and stack of a thread (the stack is what spills, in
bytes); shared memory of a program in KiB; and `held`, the share of its warps that a multiprocessor can hold at a
time, limited by registers and shared memory. This section sums them up: the number of compilations, then the least and
the most of each figure. Shared memory of a program is at most 163 KiB on sm_80, 99 on sm_86, sm_89 and sm_120, 227 on
sm_90 and sm_100, which `tile_sizes.py` checks of every tile when it is imported. Nothing here is a speed.

`python tools/kernel_resources.py --write` compiles what changed since. This section sums up the lines of triton
{version}; the file also has lines of other versions. A line's key is of what was compiled: `--check` names launches
without a line, and lines whose key is of an earlier source. `--page` writes this section from the file.

"""


def rows(found: Sequence[Report], version: str) -> list[Row]:
    """The lines of the data file."""
    return [
        {
            "kernel": r.kernel, "case": r.case, "arch": str(r.arch),
            "tile": "x".join(str(r.constants[n]) for n in ("M", "N") if n in r.constants),
            "warps": str(r.warps), "stages": str(r.stages or ""), "registers": str(r.registers), "stack": str(r.stack),
            "shared_kib": f"{r.shared / 1024:g}", "held": f"{r.occupancy:.0%}", "error": r.error, "triton": version,
            "key": r.key, "wait": r.wait, "trip": str(r.trip or ""),
        }
        for r in found
    ]  # fmt: skip


def update_page(text: str, lines: Sequence[Row]) -> str:
    """Returns ``text``, which is docs/cuda.md, with its section about kernels made from ``lines``."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(lines)}\n{END}{rest.partition(END)[2]}"


def markdown(lines: Sequence[Row]) -> str:
    """One table: a line per kernel, a column per architecture."""
    archs = sorted({int(r["arch"]) for r in lines})
    versions = sorted({r["triton"] for r in lines}, key=_numbers)
    waits, lines = waits_table(lines, versions), [r for r in lines if r["triton"] == versions[-1]]
    out = [HEAD.format(version=versions[-1]), "| kernel | " + " | ".join(f"sm_{a}" for a in archs) + " |\n"]
    out.append("|---" * (len(archs) + 1) + "|\n")
    for kernel in dict.fromkeys(r["kernel"] for r in lines):
        own = {a: [r for r in lines if r["kernel"] == kernel and r["arch"] == str(a)] for a in archs}
        out.append(f"| `{kernel}` | " + " | ".join(_cell(own[a]) for a in archs) + " |\n")
    return "".join([*out, waits])


WAITS = """
### Waits for products by warp groups

On sm_90 a program of 8 warps has two groups of four, and ``wgmma.wait_group`` waits for the products of its own group
alone: shared memory that they read may be written only behind a barrier, or where it is another stage of the pipeline
or an area of its own through which threads exchange values. Launches by what stands behind their waits; none may be
unguarded. No other architecture has these products.

"""


def waits_table(lines: Sequence[Row], versions: Sequence[str]) -> str:
    """A line per kernel of two warp groups on sm_90, a column per version of Triton."""
    own = [r for r in lines if may_wait(r["kernel"], int(r["arch"]), int(r["warps"])) and r["wait"]]
    if not own:
        return ""
    out = [
        WAITS,
        "| kernel | " + " | ".join(f"Triton {v}" for v in versions) + " |\n|---" + "|---" * len(versions) + "|\n",
    ]
    for kernel in dict.fromkeys(r["kernel"] for r in own):
        counts = [Counter(r["wait"] for r in own if (r["kernel"], r["triton"]) == (kernel, v)) for v in versions]
        cells = (", ".join(f"{n} {NAMES[kind]}" for kind, n in sorted(count.items())) for count in counts)
        out.append(f"| `{kernel}` | " + " | ".join(cells) + " |\n")
    return "".join(out)


NAMES = {
    GUARDED: "behind a barrier", STAGED: "to another stage", EXCHANGED: "of exchanged values",
    UNGUARDED: "**unguarded**", NO_WAIT: "without such waits",
}  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split(".") if n.isdigit())


def _cell(lines: Sequence[Row]) -> str:
    good = [r for r in lines if not r["error"]]
    failed = f"**{len(lines) - len(good)} do not compile** " if len(good) < len(lines) else ""
    if not good:
        return failed.strip()
    large = [r for r in good if float(r["shared_kib"]) * 1024 > CARDS[int(r["arch"])].shared]
    stack = max(int(r["stack"]) for r in good)
    parts = [
        f"{failed}{len(good)}: {_span(int(r['registers']) for r in good)} reg",
        *([f"**stack {stack}**"] if stack else []),
        f"{_span(round(float(r['shared_kib']), 1) for r in good)} KiB"
        + (f" **{len(large)} too large**" if large else ""),
        f"{_span(int(r['held'].rstrip('%')) for r in good)}%",
    ]
    return ", ".join(parts)


def _span(values: Iterable[float]) -> str:
    least, *_, most = sorted([*values] * 2)
    return f"{least}" if least == most else f"{least} to {most}"


def written(lines: Sequence[Row]) -> str:
    """The data file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def stored() -> list[Row]:
    """The data file's lines."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def report_of(r: Row) -> Report:
    """What a line of the data file tells of its launch; constants are not kept."""
    return Report(
        r["case"], r["kernel"], int(r["arch"]), int(r["registers"]), int(r["stack"]),
        round(float(r["shared_kib"]) * 1024), int(r["warps"]), int(r["stages"] or 0), error=r["error"], key=r["key"],
        wait=r.get("wait") or "", trip=int(r.get("trip") or 0),
    )  # fmt: skip


def compiled_lines(lines: Sequence[Row]) -> Known:
    """What lines of the data file tell of their keys; without those whose waits have not been read and matter."""
    return {
        r["key"]: {"registers": int(r["registers"]), "stack": int(r["stack"]), "error": r["error"],
                   "shared": round(float(r["shared_kib"]) * 1024), "wait": _wait(r), "trip": int(r.get("trip") or 0)}
        for r in lines
        if r.get("key") and (_wait(r) or not may_wait(r["kernel"], int(r["arch"]), int(r["warps"])))
    }  # fmt: skip


def _wait(r: Row) -> str:
    """Returns what stands behind the waits of a line; earlier lines say nothing where there are none."""
    return r.get("wait") or (NO_WAIT if r.get("trip") else "")


MULTIPLY = (
    "items_kernel", "turned_items_kernel", "verify_items_kernel", "windows_kernel", "images_kernel", "pictures_kernel",
    "skinny_kernel", "coded_skinny_kernel", "quantised_kernel", "experts_kernel", "experts_down_kernel",
    "coded_experts_kernel", "coded_experts_down_kernel", "squares_kernel", "scan_kernel", "_shrink", "_expand",
)  # fmt: skip
"""Kernels with products (``tl.dot``)."""

ONE_GROUP = 4
"""Warps of a warp group: a program with more has several, each with waits of its own."""


def may_wait(kernel: str, arch: int, warps: int) -> bool:
    """True if a launch may have waits for products of its own warp group beside another group."""
    return kernel in MULTIPLY and arch == 90 and warps > ONE_GROUP


def merged(made: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """``made``, and lines of ``before`` for launches that are not compiled yet, by kernel, architecture and case."""
    named = {_place(r): r for r in [*before, *made]}
    named = {place: {name: r.get(name) or "" for name in FIELDS} for place, r in named.items()}
    first = {r["kernel"]: i for i, r in reversed([*enumerate([*before, *made])])}
    return sorted(named.values(), key=lambda r: _order(r, first))


def _order(r: Row, first: dict[str, int]) -> tuple[int | str | tuple[int, ...], ...]:
    return first[r["kernel"]], int(r["arch"]), r["case"], r["tile"], _numbers(r["triton"])


def _place(r: Row) -> tuple[str, ...]:
    return r["kernel"], r["case"], r["arch"], r["triton"]
