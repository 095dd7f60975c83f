"""Everything that is open about a Gaudi, measured in one run of ten minutes at most, each claim with its bar.

PYTHONPATH=$PWD python -P -m benchmarks.hpu [--only device,demo,mixed,three,ranks,seven] [--minutes 9.5] [--no-record]
PYTHONPATH=$PWD python -P -m benchmarks.hpu --smoke      the same on an emulated card, tiny: judges nothing

Needs what ``trencadis`` needs offline (torch, numpy, Pillow, tokenizers, safetensors, jinja2), no network, no server
packages and no transformers: the CPU backend is the oracle. Prints a line for each claim and writes ``hpu.json`` after
each part: what fails or runs out of time takes nothing with it. On a card it enters the figures in ``hardware.json``,
which ``hardware.md`` is made from. Ends with 0 where every claim that was measured holds, 1 where one fails or a part
ended early, 2 without a card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.checkpoints import SHAPES, checkpoint, text_bytes
from benchmarks.harness.compared_engines import Setup
from benchmarks.harness.reporting import RESULTS, ROOT
from benchmarks.harness.subprocesses import PartRun
from benchmarks.hpu.claims import CLAIMS
from trencadis.assets import demo_path
from trencadis.backends.hpu.decode_step_time_estimate import times
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.cpu_affinity import available_cpus

SIDE = 448
"""Pixels along an image's side."""


class HpuRun(PartRun):
    """One run on ``hpu``."""

    kind, claims = "hpu", CLAIMS

    def setup(self, model: str, dtype: str, length: int = 2048, kv: int = 4 << 30) -> Setup:
        """A side: prompts of up to ``length`` tokens, ``kv`` bytes of KV cache; tiny with ``smoke``."""
        made = Setup(model, available_cpus(), "hpu", dtype, kv=kv, max_model_len=length, pixels=SIDE * SIDE)
        tiny = replace(made, threads=1, kv=32 << 20, max_model_len=512, seqs=4, tokens=256, pixels=112 * 112)
        return tiny if self.smoke else made

    def probe(self, name: str, setup: Setup, figures: str) -> Any:
        """``benchmarks.hpu.engine_probe`` of one setup."""
        out = self.new_file(name)
        few = ("--samples", "1", "--talks", "1", "--copied", str(1 << 20)) if self.smoke else ()
        return self.child(
            name, "hpu.engine_probe", json.dumps(asdict(setup)), str(out), "--figures", figures, *few, out=out
        )


def device(run: HpuRun) -> None:
    """Copies, stores and releases of the backend alone."""
    out = run.new_file("device")
    few = ("--rounds", "40", "--large", str(64 << 20)) if run.smoke else ()
    found = run.child("device", "hpu.device_probe", str(out), *few, out=out)
    if found is not None:
        run.card = run.card or found["device"]
        names = (
            "fetches", "fills", "fill_us", "fetch_us", "record_us", "thresholds_ms", "dispatch_us", "experts",
            "fp8_experts", "in_place", "released", "pinned", "product", "oom_text", "attend_ms", "attend_parts",
            "experts_ms",
        )  # fmt: skip
        run.values |= {name: found[name] for name in names if name in found}


def demo(run: HpuRun) -> None:
    """The bundled checkpoint against the CPU, twice: the second start compiles nothing."""
    path = str(demo_path())
    exact = run.setup(path, "float32")
    wanted = run.probe("demo-cpu", replace(exact, device="cpu"), "answers,forced")
    first = run.probe("demo", exact, "answers,fallbacks,graph_breaks,vision_refused")
    if first is not None and wanted is not None and "answers" in first:
        pairs = list(zip(first["answers"], wanted["answers"], strict=True))
        run.values["demo_tokens"] = sum(a != b for a, b in pairs)
        run.notes["demo_tokens"] = f"of {len(pairs)}"
    if first is not None and "fallbacks" in first:
        run.values["fallbacks"] = first["fallbacks"]
    for name in ("graph_breaks", "vision_refused"):
        if first is not None and name in first:
            run.values[name] = first[name]
    again = run.probe("demo-again", exact, "")
    if first is not None and again is not None:
        run.values["restart"] = again["compiled"]
        run.notes["restart"] = (
            f"{first['compiled']} at first, {first['seconds']:.0f} s against {again['seconds']:.0f} s"
        )
    rough = run.probe("demo-bf16", replace(exact, dtype="bfloat16"), "forced")
    if rough is not None and wanted is not None and "forced" in rough and "forced" in wanted:
        top1(run, rough["forced"], wanted["forced"])


def top1(run: HpuRun, ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Enters how many forced choices agree."""
    pairs = [
        (a, b)
        for mine, exact in zip(ours, wanted, strict=True)
        for a, b in zip(mine["picks"], exact["picks"], strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    run.values["demo_top1"] = 100 * same / len(pairs)
    run.notes["demo_top1"] = f"{len(pairs) - same} of {len(pairs)} differ"


def mixed(run: HpuRun) -> None:
    """Mixed requests on the demo checkpoint after warm-up."""
    out, setup = run.new_file("mixed"), run.setup(str(demo_path()), "bfloat16", 4096, 8 << 30)
    few = ("--requests", "6", "--live", "3", "--longest", "20", "--side", "8") if run.smoke else ("--seconds", "120")
    found = run.child("mixed", "gpu.mixed", json.dumps(asdict(setup)), str(out), *few, out=out, limit=300)
    if found is None:
        return
    run.values |= {"captures": found["new_captures"], "recompiles": found["lazy_compiles"] + found["recompiles"]}
    run.notes["captures"] = f"{found['requests']} requests, {found['launches']} launches, misses {found['misses']}"


def three(run: HpuRun) -> None:
    """A random checkpoint of the 3B's sizes: compiling, graphs, memory and pace."""
    begun = time.monotonic()
    path = checkpoint("tiny" if run.smoke else "three")
    print(f"checkpoint {path.name}: {time.monotonic() - begun:.0f} s", flush=True)
    found = run.probe(
        "three", run.setup(str(path), "bfloat16", 8192, 0), "pools,ledger,tpot,step_32,idle,copy,step_128"
    )
    if found is None:
        return
    run.values["compile_seconds"] = found["bucket_seconds"]
    for name, pool in found.get("pools", {}).items():
        if pool["predicted"]:
            run.values[f"{name}_graphs"] = 100 * abs(pool["measured"] / pool["predicted"] - 1)
            run.notes[f"{name}_graphs"] = f"{pool['graphs']} graphs, {pool['measured'] / 2**20:.0f} MiB"
    if (book := found.get("ledger")) is not None:
        run.values["ledger"] = 100 * abs(book["booked"] - book["used"]) / book["total"]
        run.notes["ledger"] = f"{book['booked'] / 2**30:.2f} GiB booked, {book['used'] / 2**30:.2f} GiB used"
    for name in ("step_32", "step_128"):
        if name in found:
            compare_step(run, name, found[name], path)
    if "idle" in found:
        run.values["idle"] = found["idle"]
    if "tpot" in found and "copy" in found:
        weights = text_bytes(SHAPES[path.name], 2)
        run.values["tpot"] = found["tpot"] / (weights / found["copy"])
        run.notes["tpot"] = f"{1e3 * found['tpot']:.2f} ms, {weights / 1e9:.2f} GB, {found['copy'] / 1e9:.0f} GB/s"


def compare_step(run: HpuRun, name: str, step: dict[str, Any], path: Path) -> None:
    """Enters a measured step of decoding as a multiple of the one on paper."""
    (load,) = times(load_config(path), rows=(step["rows"],), contexts=(step["context"],))["loads"]
    run.values[name] = step["seconds"] / load["tpot"]
    run.notes[name] = f"{1e3 * step['seconds']:.2f} ms, {1e3 * load['tpot']:.2f} ms on paper"


def seven(run: HpuRun) -> None:
    """A random checkpoint of the 7B's sizes: the pace of 32 rows."""
    path = checkpoint("tiny" if run.smoke else "seven")
    found = run.probe("seven", run.setup(str(path), "bfloat16", 8192, 0), "step_32_long")
    if found is not None and "step_32_long" in found:
        compare_step(run, "step_seven", found["step_32_long"], path)


def ranks(run: HpuRun) -> None:
    """Two cards."""
    out, setup = run.new_file("ranks"), run.setup(str(demo_path()), "float32")
    few = ("--rounds", "5", "--samples", "1") if run.smoke else ()
    found = run.child("ranks", "hpu.ranks_probe", json.dumps(asdict(setup)), str(out), *few, out=out)
    if found is None:
        return
    if "all_reduce_us" in found:
        run.values["all_reduce_us"] = found["all_reduce_us"]
    if "all_reduce_eager_us" in found:
        run.values["all_reduce_eager_us"] = found["all_reduce_eager_us"]
    if "differ" in found:
        run.values["ranks_tokens"], run.notes["ranks_tokens"] = found["differ"], f"of {found['answers']}"


PARTS: dict[str, Callable[[HpuRun], None]] = {
    "device": device, "demo": demo, "mixed": mixed, "three": three, "ranks": ranks, "seven": seven,
}  # fmt: skip
"""In the order in which they run: what needs least of the card first."""


def emulated() -> bool:
    """Whether this machine's card is an emulated one.

    Raises:
        StartupError: a Gaudi whose plug-in cannot be used.
    """
    import os

    from trencadis.backends.hpu.start import gaudi_mode_and_env

    return not gaudi_mode_and_env.find_capability(os.environ).real


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: checks that the parts run, judges nothing")
    parser.add_argument("--minutes", type=float, default=9.5, help="stop every part after so long")
    parser.add_argument("--no-record", action="store_true", help="do not update the hardware pages")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of hpu.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of hardware.json and hardware.md")
    args = parser.parse_args()
    names = args.only.split(",")
    if wrong := sorted(set(names) - set(PARTS)):
        parser.error(f"unknown part {wrong[0]!r}; known: {', '.join(PARTS)}")
    if emulated() and not args.smoke:
        print("benchmarks.hpu needs a Gaudi; --smoke runs it on an emulated one", file=sys.stderr)
        return 2
    run = HpuRun("hpu", args.smoke, time.monotonic() + 60 * args.minutes, args.out.resolve())
    run.run_parts(PARTS, names)
    recorded = not args.smoke and not args.no_record
    return run.finish(args.docs.resolve() if recorded else None)
