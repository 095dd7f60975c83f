"""Compiles the CUDA kernels ahead of time, without a GPU, and says what each needs: ``docs/kernels.csv``, and
the section *Kernels* of ``docs/cuda.md`` for readers.

    python tools/kernel_resources.py [--arch 80 86 89 90] [--kernels attend_decode ...] [--match TEXT] [--jobs 2]
                                     [--waits] [--json FILE] [--write] [--seconds N] [--again] [--page] [--check]

Every entry of every tile table is compiled for its architecture with the constants its launcher passes: launchers run
on small CPU tensors while Triton's launch is replaced by a recorder. Registers and stack come from the ``cuobjdump``
that Triton ships; what a kernel keeps on the stack is what it spills.

A launch is compiled where its key (compiled/digests.py) is neither in docs/kernels.csv nor in build/kernels.jsonl, to
which each is added as it ends. ``--seconds`` begins none after that time, and the next call goes on; 16-bit attention
and products come first. The figures are those of the Triton that is installed; lines of other versions stay, so that
with another one on PYTHONPATH the tool adds its lines beside them. ``--check`` compiles nothing: it names launches of
these sources that the installed version has not compiled, and lines whose key no launch has. Ends with 1 where a
float16 or bfloat16 attention kernel or product spills or a kernel does not fit the shared memory of its architecture.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.compiled.assembly import NO_WAIT, UNGUARDED, guard, trip_instructions  # noqa: E402
from tools.compiled.digests import FIGURES, Known, Progress, key_of  # noqa: E402
from tools.compiled.table import (  # noqa: E402
    CARDS,
    DATA,
    ONE_GROUP,
    PAGE,
    Report,
    Row,
    compiled_lines,
    may_wait,
    merged,
    rows,
    stored,
    update_page,
    written,
)


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its argument types, constants and compile options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, int]


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


OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


def _launch(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Launch:
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
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


def built(launch: Launch, arch: int) -> Any:
    """Triton's kernel of one launch, compiled for one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    index = launch.kernel.arg_names.index
    attrs = {(index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, **launch.options})


def compiled(case: str, launch: Launch, arch: int) -> Report:
    """Compiles one launch for one architecture."""
    name, warps, stages = (
        launch.kernel.__name__,
        launch.options.get("num_warps", 4),
        launch.options.get("num_stages", 0),
    )
    try:
        made = built(launch, arch)
    except Exception as error:
        return Report(case, name, arch, error=f"{type(error).__name__}: {error}"[:200], warps=warps)
    registers, stack = usage(made.asm["cubin"])
    ptx = made.asm["ptx"]
    wait = (guard(ptx) if warps > ONE_GROUP else "") or NO_WAIT
    beside = wait, trip_instructions(machine_code(made.asm["cubin"]))
    return Report(
        case, name, arch, registers, stack, made.metadata.shared, warps, stages, launch.constants, "", "", *beside
    )


def machine_code(cubin: bytes) -> str:
    """The disassembly of a kernel."""
    return disassembled(cubin, "-sass")


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of stack of a thread)."""
    text = disassembled(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def disassembled(cubin: bytes, what: str) -> str:
    """What Triton's ``cuobjdump`` says of a kernel."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        env = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True, env=env).stdout


@dataclass(frozen=True)
class Slice:
    """Which launches one process sees to: every ``of``-th from ``first`` on, and begins none after ``until``."""

    groups: tuple[str, ...]
    archs: tuple[int, ...]
    match: str = ""
    first: int = 0
    of: int = 1
    until: float = float("inf")  # by time.time
    waits: bool = False  # only launches that ``may_wait``
    known: Known = field(default_factory=dict)


def _work(part: Slice) -> list[dict[str, Any]]:
    """Reports of what is known or was compiled in time."""
    import triton

    progress, known = Progress(PROGRESS), dict(part.known)
    found = []
    for case, launch, arch in _launches(part)[part.first :: part.of]:
        key = key_of(launch, arch, triton.__version__)
        if key not in known and time.time() < part.until:
            begun = time.time()
            made = asdict(compiled(case, launch, arch))
            progress.add(key, time.time() - begun, made)
            known[key] = made
        if key in known:
            found.append(asdict(_report(case, launch, arch, key, known[key])))
    return found


def _launches(part: Slice) -> list[tuple[str, Launch, int]]:
    """All launches of the slice's groups: attention and products first, float32 last."""
    from tools.kernel_cases import CASES

    found = [
        (case, launch, arch)
        for arch in part.archs
        for group in part.groups
        for case, run in CASES[group](arch)
        if part.match in case
        for launch in record(run)
        if not part.waits or may_wait(launch.kernel.__name__, arch, launch.options.get("num_warps", 4))
    ]
    return sorted(found, key=lambda one: ("float32" in one[0], not one[1].kernel.__name__.startswith(ATTENTION)))


def _report(case: str, launch: Launch, arch: int, key: str, figures: dict[str, Any]) -> Report:
    options = launch.options
    reported = {name: figures[name] for name in FIGURES if name in figures}
    warps, stages = options.get("num_warps", 4), options.get("num_stages", 0)
    return Report(case, launch.kernel.__name__, arch, warps=warps, stages=stages, constants=launch.constants, key=key,
                  **reported)  # fmt: skip


def reports(
    groups: Sequence[str], archs: Sequence[int], jobs: int = 1, match: str = "", seconds: float = float("inf"),
    known: Known | None = None, waits: bool = False,
) -> list[Report]:  # fmt: skip
    """Compiles the cases of ``groups`` for ``archs``, in ``jobs`` processes, or in this one where that is 1."""
    known, until = known or {}, time.time() + seconds
    work = [Slice(tuple(groups), tuple(archs), match, i, jobs, until, waits, known) for i in range(jobs)]
    with tempfile.TemporaryDirectory() as cache:
        if jobs == 1:
            _set_cache(cache)
            done = [_work(work[0])]
        else:
            with multiprocessing.get_context("spawn").Pool(jobs, _set_cache, (cache,)) as pool:
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
        elif r.wait == UNGUARDED:
            wrong.append(f"{label}: writes shared memory behind a product's wait without a barrier")
        elif r.stack and "float32" not in r.case and r.kernel.startswith(ATTENTION):
            wrong.append(f"{label}: spills {r.stack} bytes a thread")
    return wrong


def mismatches(version: str) -> list[str]:
    """Lines about launches that ``version`` has not compiled, and about lines of any version whose key is of no
    launch.
    """
    from tools.kernel_cases import CASES

    launches = _launches(Slice(tuple(CASES), tuple(sorted(CARDS))))
    lines = stored()
    known = {r["key"] for r in lines}
    versions = {version, *(r["triton"] for r in lines)}
    keys = {v: {key_of(launch, arch, v): (case, launch, arch) for case, launch, arch in launches} for v in versions}
    lacking = [f"{case} ({x.kernel.__name__}) on sm_{arch}: not compiled by {version}"
               for key, (case, x, arch) in keys[version].items() if key not in known]  # fmt: skip
    old = [f"{r['case']} ({r['kernel']}) on sm_{r['arch']}, {r['triton']}: {r['key']} is of no launch"
           for r in lines if r["key"] not in keys[r["triton"]]]  # fmt: skip
    return [*lacking, *old]


ATTENTION = (
    "items",
    "turned_items",
    "verify_items",
    "join",
    "windows",
    "images",
    "pictures",
    "skinny",
    "coded_skinny",
    "decoding",
    "quantised",
    "added",
    "experts",
    "coded_experts",
    "conv",
    "scan_kernel",
    "squares_kernel",
    "step_kernel",
)

PROGRESS = ROOT / "build" / "kernels.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=[*sorted(CARDS)])
    parser.add_argument("--kernels", nargs="*", help="groups of cases (tools/kernel_cases.py); all by default")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--waits", action="store_true", help="only launches that may wait for products of warp groups")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no compilation after so long")
    parser.add_argument("--again", action="store_true", help="compile what is known, too")
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    parser.add_argument("--write", action="store_true", help="write docs/kernels.csv and the section of docs/cuda.md")
    parser.add_argument("--check", action="store_true", help="name keys without a launch and launches without a line")
    parser.add_argument(
        "--page", action="store_true", help="write the section of docs/cuda.md from docs/kernels.csv; compile nothing"
    )
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8"), stored()), encoding="utf-8")
        return 0
    os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported, which is below
    import triton

    from tools.kernel_cases import CASES

    if args.check:
        wrong = mismatches(triton.__version__)
        print(*wrong, sep="\n")
        return 1 if wrong else 0
    known = {} if args.again else compiled_lines(stored()) | Progress(PROGRESS).known()
    groups = args.kernels or list(CASES)
    found = reports(groups, args.arch, args.jobs, args.match, args.seconds, known, args.waits)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in found], indent=1), encoding="utf-8")
    lines = rows(found, triton.__version__)
    if args.write:
        _write(lines, args)
    else:
        print(written(lines))
    wrong = faults(found)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _write(lines: list[Row], args: argparse.Namespace) -> None:
    """Writes both files; a call that began no compilation too late leaves nothing of earlier sources."""
    import triton

    some = args.kernels or args.match or args.waits or {*args.arch} != {*CARDS}
    whole = args.seconds == float("inf") and not some
    kept = merged(lines, [r for r in stored() if not whole or r["triton"] != triton.__version__])
    DATA.write_text(written(kept), encoding="utf-8")
    PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")
    old = sum(not r.get("key") for r in kept)
    print(f"docs/kernels.csv: {len(lines)} launches compiled from these sources, {old} lines of earlier ones")


if __name__ == "__main__":
    sys.exit(main())
