"""Compiles the CUDA kernels ahead of time, without a GPU, and says what each needs: ``docs/kernels.csv``, and
``docs/kernels.md`` for readers.

    python tools/kernel_resources.py [--arch 80 86 89 90] [--kernels attend_decode ...] [--match TEXT] [--jobs 2]
                                     [--json FILE] [--read FILE ...] [--write] [--page]

Every entry of every tile table is compiled for its architecture with the constants its launcher passes: launchers run
on small CPU tensors while Triton's launch is replaced by a recorder. Registers and stack come from the ``cuobjdump``
that Triton ships; what a kernel keeps on the stack is what it spills. Ends with 1 where a float16 or bfloat16 attention
kernel or product spills or a kernel does not fit the shared memory of its architecture.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


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
class Launch:
    """One recorded launch: the kernel, its argument types, constants and compile options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, int]


@dataclass(frozen=True)
class Report:
    """What one kernel needs on one architecture; ``error``: it does not compile."""

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


def record(run: Any) -> list[Launch]:
    """The launches that ``run()`` makes, recorded without running them."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []
    kept = JITFunction.run

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(_launch(self, args, kwargs))

    JITFunction.run = note
    try:
        run()
    finally:
        JITFunction.run = kept
    return found


def _launch(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Launch:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
    for name in ("grid", "warmup"):
        kwargs.pop(name, None)
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, divisible = {}, {}, []
    for p in kernel.params:
        value = given[p.name]
        if p.is_constexpr:
            signature[p.name], constants[p.name] = "constexpr", value
        elif hasattr(value, "data_ptr"):
            signature[p.name] = "*" + _type(value)
            if value.data_ptr() % 16 == 0:
                divisible.append(p.name)
        elif isinstance(value, float):
            signature[p.name] = "fp32"
        elif value == 1 and not p.do_not_specialize:
            signature[p.name], constants[p.name] = "constexpr", 1
        else:
            signature[p.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and not p.do_not_specialize:
                divisible.append(p.name)
    return Launch(kernel, signature, constants, tuple(divisible), options)


def _type(tensor: Any) -> str:
    names = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1"}
    name = str(tensor.dtype).removeprefix("torch.")
    return names.get(name) or name.replace("uint", "u").replace("int", "i")


def compiled(case: str, launch: Launch, arch: int) -> Report:
    """Compiles one launch for one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    index = launch.kernel.arg_names.index
    attrs = {(index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attrs)
    options = {"num_warps": 4, **launch.options}
    name = launch.kernel.__name__
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        return Report(case, name, arch, error=f"{type(error).__name__}: {error}"[:200], warps=options["num_warps"])
    registers, stack = _usage(made.asm["cubin"])
    stages = options.get("num_stages", 0)
    return Report(
        case, name, arch, registers, stack, made.metadata.shared, options["num_warps"], stages, launch.constants
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of stack of a thread)."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _work(job: tuple[str, int, str]) -> list[dict[str, Any]]:
    """Compiles the cases of one group for one architecture; ``match``: only those whose name contains it."""
    from tools.kernel_cases import CASES

    group, arch, match = job
    cases = ((case, run) for case, run in CASES[group](arch) if match in case)
    return [asdict(report) for case, run in cases for report in _reports(case, run, arch)]


def _reports(case: str, run: Any, arch: int) -> Iterator[Report]:
    for launch in record(run):
        yield compiled(case, launch, arch)


def reports(groups: Sequence[str], archs: Sequence[int], jobs: int = 1, match: str = "") -> list[Report]:
    """Compiles the cases of ``groups`` for ``archs``, in ``jobs`` processes, or in this one where that is 1."""
    work = [(group, arch, match) for group in groups for arch in archs]
    with tempfile.TemporaryDirectory() as cache:
        if jobs == 1:
            _set_cache(cache)
            done = [_work(job) for job in work]
        else:
            with multiprocessing.get_context("spawn").Pool(jobs, _set_cache, (cache,), maxtasksperchild=1) as pool:
                done = pool.map(_work, work, chunksize=1)
    return [Report(**report) for part in done for report in part]


def _set_cache(folder: str) -> None:
    os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}


def faults(found: Sequence[Report]) -> list[str]:
    """Lines about kernels that break a rule: 16-bit attention or products that spill, or what does not fit."""
    wrong = []
    for r in found:
        label = f"{r.case} ({r.kernel}) on sm_{r.arch}"
        if r.error:
            wrong.append(f"{label}: {r.error}")
        elif not r.fits:
            wrong.append(f"{label}: {r.shared} bytes of shared memory of {CARDS[r.arch].shared}")
        elif r.stack and "float32" not in r.case and r.kernel.startswith(ATTENTION):
            wrong.append(f"{label}: spills {r.stack} bytes a thread")
    return wrong


ATTENTION = ("items", "join", "windows", "images", "quantised", "added", "experts")

DATA, PAGE = ROOT / "docs" / "kernels.csv", ROOT / "docs" / "kernels.md"
FIELDS = (
    "kernel",
    "case",
    "arch",
    "tile",
    "warps",
    "stages",
    "registers",
    "stack",
    "shared_kib",
    "held",
    "error",
    "triton",
)
Row = dict[str, str]

HEAD = """# Kernels

What the CUDA kernels need, compiled ahead of time without a GPU. Each compilation is a line of
[kernels.csv](kernels.csv): tile, warps and stages; registers and stack of a thread (the stack is what spills, in
bytes); shared memory of a program in KiB; and `held`, the share of its warps that a multiprocessor can hold at a
time, limited by registers and shared memory. This page sums them up: the number of compilations, then the least and
the most of each figure. Shared memory of a program is at most 163 KiB on sm_80, 99 on sm_86, sm_89 and sm_120, 227 on
sm_90 and sm_100, which `tiles.py` checks of every tile when it is imported. Nothing here is a speed.

`python tools/kernel_resources.py --write` compiles everything again (triton {version} made these lines), `--page`
writes this page from the file.

"""


def rows(found: Sequence[Report], version: str) -> list[Row]:
    """The lines of the data file."""
    return [
        {
            "kernel": r.kernel, "case": r.case, "arch": str(r.arch),
            "tile": "x".join(str(r.constants[n]) for n in ("M", "N") if n in r.constants),
            "warps": str(r.warps), "stages": str(r.stages or ""), "registers": str(r.registers), "stack": str(r.stack),
            "shared_kib": f"{r.shared / 1024:.1f}", "held": f"{r.occupancy:.0%}", "error": r.error, "triton": version,
        }
        for r in found
    ]  # fmt: skip


def markdown(lines: Sequence[Row]) -> str:
    """One table: a line per kernel, a column per architecture."""
    archs = sorted({int(r["arch"]) for r in lines})
    version = ", ".join(sorted({r["triton"] for r in lines}))
    out = [HEAD.format(version=version), "| kernel | " + " | ".join(f"sm_{a}" for a in archs) + " |\n"]
    out.append("|---" * (len(archs) + 1) + "|\n")
    for kernel in dict.fromkeys(r["kernel"] for r in lines):
        own = {a: [r for r in lines if r["kernel"] == kernel and r["arch"] == str(a)] for a in archs}
        out.append(f"| `{kernel}` | " + " | ".join(_cell(own[a]) for a in archs) + " |\n")
    return "".join(out)


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
        f"{_span(float(r['shared_kib']) for r in good)} KiB" + (f" **{len(large)} too large**" if large else ""),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=[*sorted(CARDS)])
    parser.add_argument("--kernels", nargs="*", help="groups of cases (tools/kernel_cases.py); all by default")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    parser.add_argument("--read", type=Path, nargs="*", help="read figures that --json wrote instead of compiling")
    parser.add_argument("--write", action="store_true", help="write docs/kernels.csv and docs/kernels.md")
    parser.add_argument(
        "--page", action="store_true", help="write docs/kernels.md from docs/kernels.csv; compile nothing"
    )
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(markdown(stored()), encoding="utf-8")
        return 0
    os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported, which is below
    found = _read(args.read) if args.read else _compile(args.kernels, args.arch, args.jobs, args.match)
    import triton

    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in found], indent=1), encoding="utf-8")
    lines = rows(found, triton.__version__)
    if args.write:
        DATA.write_text(written(lines), encoding="utf-8")
        PAGE.write_text(markdown(lines), encoding="utf-8")
    print(f"docs/kernels.csv: {len(found)} compilations" if args.write else written(lines))
    wrong = faults(found)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _compile(groups: Sequence[str] | None, archs: Sequence[int], jobs: int, match: str) -> list[Report]:
    from tools.kernel_cases import CASES

    return reports(groups or list(CASES), archs, jobs, match)


def _read(files: Sequence[Path]) -> list[Report]:
    return [Report(**r) for file in files for r in json.loads(file.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
