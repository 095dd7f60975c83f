"""Everything that is claimed of an NVIDIA card, measured in one run of nine minutes, each claim with its bar.

PYTHONPATH=$PWD python -P -m benchmarks.gpu [--only decode,layers,...] [--minutes 9] [--no-record]
PYTHONPATH=$PWD python -P -m benchmarks.gpu --only three,demo --out DIR --docs DIR    in parts; files go to DIR
PYTHONPATH=$PWD python -P -m benchmarks.gpu --device twin --smoke     all parts, tiny; what needs a card says so

Values come first, and at once, since they take compilers' time and no measure of speed: decode, layers, repeats and
the kernels' tests. Then, one by one and by worth: mixed requests, where time goes (paces), kernels, ``serve``, and what
nine minutes may no longer hold, which ``--only`` runs by itself. Needs torch, triton, numpy, Pillow, tokenizers,
safetensors, jinja2, httpx, idna and transformers, no network, and nothing to be installed of this project; ``serve``
needs the server's packages, too, and is left out without them. Prints a line for each claim and writes ``gpu.json``
after each part: what fails or runs out of time takes nothing with it. On a card it enters the figures in
``hardware.json``, which ``hardware.md`` is made from. Ends with 0 where every claim that was measured holds, 1 where
one fails or a part ended early, 2 without a card.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.claims import CLAIMS, kernel_values
from benchmarks.harness.checkpoints import SHAPES, checkpoint, text_bytes
from benchmarks.harness.compared_engines import SIDE, Setup
from benchmarks.harness.reporting import RESULTS, ROOT, quantile
from benchmarks.harness.subprocesses import PartRun, ended
from trencadis.assets import demo_path
from trencadis.core.cpu_affinity import available_cpus


class Run(PartRun):
    """One run on ``cuda``, ``twin`` (the CUDA backend without a card) or ``cpu``."""

    kind, claims = "gpu", CLAIMS

    def setup(self, model: str, length: int, kv: int) -> Setup:
        """A side in bfloat16: prompts of up to ``length`` tokens, ``kv`` bytes of KV cache; tiny with ``smoke``."""
        device, policy = ("cuda", "twin") if self.device == "twin" else (self.device, "")
        made = Setup(model, available_cpus(), device, "bfloat16", kv=kv, max_model_len=length, policy=policy)
        tiny = replace(made, threads=1, kv=32 << 20, max_model_len=1024, seqs=8, tokens=512)
        return tiny if self.smoke else made

    @property
    def torch_device(self) -> str:
        """The torch device on which transformers runs."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def first(self) -> float:
        """Seconds that each process of the values may take."""
        return FIRST if self.device == "cuda" else ELSEWHERE

    def at_once(self, *calls: Callable[[], object]) -> None:
        """Runs ``calls`` at once on a card's machine, which has cores for them; elsewhere one by one."""
        if self.device == "cuda":
            self.run_together(calls)
            return
        for call in calls:
            call()


def decode(run: Run) -> None:
    """Decoded tokens of the demo and of the random checkpoint against prompts of the same ids."""
    found = dict[str, Any]()

    def measure(name: str, path: Path) -> None:
        setup = replace(run.setup(str(path), 2048, 4 << 30), pixels=SIDE * SIDE)
        few: tuple[str, ...] = ()
        if run.smoke:
            setup, few = replace(setup, seqs=18), ("--rows", "1,8,16,17", "--tokens", "6", "--long", "300")
        out = run.new_file(f"decode-{name}")
        args = (json.dumps(asdict(setup)), str(out), *few)
        found[name] = run.child(f"decode-{name}", "gpu.decode", *args, out=out, limit=run.first)

    run.at_once(lambda: measure("demo", demo_path()), lambda: measure("three", model_of(run)))
    worst = dict[str, float]()
    for name, one in found.items():
        for figure in ("top1", "gap", "mean") if one is not None else ():
            worst[figure] = max(worst.get(figure, 0.0), one[figure])
            batches = ", ".join(f"{rows} rows {b[figure]:.2g}" for rows, b in one["batches"].items())
            note = run.notes.get(f"decode_{figure}", "")
            run.notes[f"decode_{figure}"] = f"{note}{'; ' if note else ''}{name}: {batches}"
    run.values |= {f"decode_{figure}": value for figure, value in worst.items()}


FIRST, ELSEWHERE = 240.0, 400.0
"""Seconds that a part may take whose processes compile kernels beside others: on a card's machine, and without one,
where they run one by one on few cores."""


def layers(run: Run) -> None:
    """Layers at real sizes, with dependent launches and without."""
    few = () if run.device == "cuda" else ("--small", "--times", "2")
    made = dict[str, Any]()

    def measure(name: str, dependent: str) -> None:
        out, variables = run.new_file(name), {DEPENDENT: dependent}
        made[dependent] = run.child(name, "gpu.layers", str(out), *few, out=out, limit=run.first, variables=variables)

    run.at_once(lambda: measure("layers", "1"), lambda: measure("layers-waiting", "0"))
    bits = list[dict[str, str]]()
    for dependent in "10":
        found = made.get(dependent)
        if found is None or not found["layers"]:
            continue
        bits.append(found["bits"])
        own = {"layer_error": found["error"], "layer_mean": found["mean"],
               "layer_cache": found["elsewhere"] + found["counters"], "layer_moved": found["moved"]}  # fmt: skip
        run.values |= {claim: max(value, run.values.get(claim, 0.0)) for claim, value in own.items()}
    if len(bits) == 2:
        run.values["layer_early"] = sum(bits[1].get(label) != value for label, value in bits[0].items())


DEPENDENT = "TRENCADIS_CUDA_DEPENDENT_LAUNCHES"


def repeats(run: Run) -> None:
    """Every case of the kernels' benchmark many times."""
    file = RESULTS / "repeats.json"
    file.unlink(missing_ok=True)
    few = ("--repeat", "100") if run.device == "cuda" else ("--interpret", "--repeat", "1")
    found = run.child("repeats", "kernels", *few, "--out", str(RESULTS), out=file, limit=run.first)
    if found is not None:
        run.values["kernel_moved"] = sum(found["cases"].values())
        run.notes["kernel_moved"] = f"{len(found['cases'])} cases"


def kernels(run: Run) -> None:
    """Measures every kernel against torch and the card's ceilings."""
    if run.device != "cuda":
        return
    file = run.out / "kernels.json"
    file.unlink(missing_ok=True)
    found = run.child("kernels", "kernels", "--out", str(run.out), out=file, limit=150)
    if found is not None:
        run.values |= kernel_values(found["cases"])


def model_of(run: Run) -> Path:
    """The random checkpoint: sizes of the 3B on a card."""
    begun = time.monotonic()
    path = checkpoint("tiny" if run.smoke else "three")
    print(f"checkpoint {path.name}: {time.monotonic() - begun:.0f} s", flush=True)
    return path


def run_probe(run: Run, name: str, setup: Setup, *more: str) -> Any:
    """``benchmarks.gpu.probe`` of one setup."""
    out = run.new_file(name)
    few = ("--samples", "8", "--tokens", "16", "--talks", "2") if run.smoke else ()
    return run.child(name, "gpu.probe", json.dumps(asdict(setup)), str(out), *more, *few, out=out)


def three(run: Run) -> None:
    """The random checkpoint with graphs and without, and against transformers in two dtypes."""
    path = model_of(run)
    setup = run.setup(str(path), 8192, 16 << 30)
    if run.smoke:  # else the engine plans for images of any size
        setup = replace(setup, pixels=SIDE * SIDE)
    found = run_probe(run, "three", setup)
    if found is None:
        return
    if "answers" in found:
        run.values["serves_three"] = 1
    if "tpot" in found and "copy" in found:
        weights = text_bytes(SHAPES[path.name], 2)
        run.values["tpot"] = found["tpot"] / (weights / found["copy"])
        run.notes["tpot"] = f"{1e3 * found['tpot']:.2f} ms, {weights / 1e9:.2f} GB, {found['copy'] / 1e9:.0f} GB/s"
    memory_claims(run, found)
    if "forced" in found:
        accuracy(run, "three", path)
    eager = run_probe(run, "three-eager", replace(setup, eager=True))
    if eager is not None:
        against_eager(run, found, eager)


def memory_claims(run: Run, found: dict[str, Any]) -> None:
    """Claims about graph memory and the ledger."""
    g, book = found.get("graphs"), found.get("ledger")
    if g is not None and g["predicted"]:
        run.values["graphs"] = 100 * abs(g["measured"] / g["predicted"] - 1)
        run.notes["graphs"] = f"{g['captured']} of {g['planned']} captured, {g['measured'] / 2**20:.0f} MiB"
    if book is not None:
        run.values["ledger"] = 100 * abs(book["booked"] - book["used"]) / book["total"]
        run.notes["ledger"] = f"{book['booked'] / 2**30:.2f} GiB booked, {book['used'] / 2**30:.2f} GiB used"


def against_eager(run: Run, graphs: dict[str, Any], eager: dict[str, Any]) -> None:
    """Compares answers bit for bit, and the time of encoding images."""
    if "answers" in graphs and "answers" in eager:
        pairs = list(zip(graphs["answers"], eager["answers"], strict=True))
        run.values["replay"] = sum(a != b for a, b in pairs)
        run.notes["replay"] = f"of {len(pairs)} answers"
    if "encoder" in graphs and "encoder" in eager:
        fast, slow = (quantile(x["encoder"], 0.99) for x in (graphs, eager))
        run.values["encoder"] = 100 * (1 - fast / slow)
        run.notes["encoder"] = f"{1e3 * fast:.2f} ms against {1e3 * slow:.2f} ms"


def accuracy(run: Run, name: str, model: Path) -> dict[str, Any] | None:
    """Forced choices of the probe ``name`` against transformers; enters the random model's claims."""
    probe, out = RESULTS / f"gpu-{name}.json", run.new_file(f"{name}-accuracy")
    args = (str(model), str(probe), str(out), "--device", run.torch_device)
    found: dict[str, Any] | None = run.child(f"{name}-accuracy", "accuracy", *args, out=out)
    if found is not None and name == "three":
        more, both = found["ours"] - found["theirs"], found["ours"] + found["theirs"]
        run.values["three_rate"] = more / math.sqrt(max(both, 1))
        run.values["three_gap"] = found["worst_gap"] / max(found["noise"], 1e-9)
        reported = f"{found['ours']} and {found['theirs']} of {found['tokens']} tokens"
        run.notes |= {"three_rate": reported, "three_gap": f"noise {found['noise']:.3g}"}
    return found


def demo(run: Run) -> None:
    """The bundled checkpoint: its own answers, forced."""
    path = demo_path()
    setup = run.setup(str(path), 2048, 4 << 30)
    found = run_probe(run, "demo", setup, "--own-answers", "--talks", "200")
    if found is None:
        return
    if "answers" in found:
        run.values["serves_demo"] = 1
    seen = accuracy(run, "demo", path) if "forced" in found else None
    if seen is not None:
        run.values["demo_top1"] = 100 * (1 - seen["ours"] / seen["tokens"])
        run.notes["demo_top1"] = f"{seen['ours']} of {seen['tokens']} differ, transformers' bf16: {seen['theirs']}"


def mixed(run: Run) -> None:
    """Mixed requests on the demo checkpoint after warm-up."""
    out, setup = run.new_file("mixed"), run.setup(str(demo_path()), 4096, 8 << 30)
    few = ("--requests", "12", "--live", "6", "--longest", "20", "--side", "8") if run.smoke else ("--seconds", "60")
    found = run.child("mixed", "gpu.mixed", json.dumps(asdict(setup)), str(out), *few, out=out, limit=150)
    if found is None:
        return
    run.values |= {"captures": found["new_captures"], "jit": found["jit"]}
    padding = f"real/padded {found['real'] / max(found['padded'], 1):.2f}"
    reported = (
        f"{found['requests']} requests, {found['launches']} launches, {padding}, without a graph: {found['misses']}"
    )
    run.notes |= {"captures": reported, "jit": str(found["jit_names"] or "none")}


def paces(run: Run) -> None:
    """TTFT and TPOT over rooflines, and the kernels of each load."""
    setup = replace(run.setup(str(model_of(run)), 32_768, 16 << 30), pixels=SIDE * SIDE)
    few = ("--rows", "1,4", "--prompts", "128") if run.smoke else ()
    out = run.new_file("paces")
    args = (json.dumps(asdict(setup)), str(out), *few, "--profile")
    found = run.child("paces", "gpu.paces", *args, out=out, limit=180)
    if found is None:
        return
    for claim, figure, least in (("paces", "tpot", 2), ("prompts", "ttft", 1)):
        taken = {int(n): one for n, one in found[figure].items() if int(n) >= least}
        if taken:
            run.values[claim] = max(one["over"] for one in taken.values())
            reported = ", ".join(f"{n}: {1e3 * one['seconds']:.2f} ms {one['over']:.2f}x" for n, one in taken.items())
            run.notes[claim] = reported


def counters(run: Run) -> None:
    """``ncu`` over five kernels, where it is installed; its tables are in ``parts`` of gpu.json."""
    tool = shutil.which("ncu")
    if run.device != "cuda" or tool is None:
        print("counters: needs a card and ncu", flush=True)
        return
    tables = run.raw.setdefault("counters", {})
    for case in PROFILED:
        left = min(60.0, run.end - time.monotonic())
        if left < 20:
            run.failures.append("counters: no time was left")
            return
        file = RESULTS / "ncu.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        # The card's clocks are left as they are: ncu would set them otherwise.
        profiled = [tool, "--clock-control", "none", "--csv", "--log-file", str(file), "--set", "basic", "-c", "8"]
        try:
            ended([*profiled, sys.executable, "-P", "-m", "benchmarks.kernels", "--only", case, "--repeat", "1"], left)
        except subprocess.TimeoutExpired:
            run.failures.append(f"counters, {case}: stopped after {left:.0f} s")
        if file.exists():
            tables[case] = file.read_text().splitlines()


PROFILED = ("decode 16/2x128 bfloat16 16 rows x 2048", "prefill 16/2x128 bfloat16 16384", "int4, 1 rows, 37888 x 3584",
            "head greedy, 256", "norm with residual 8192")  # fmt: skip
"""Cases of benchmarks.kernels whose counters are read."""


def tuner(run: Run) -> None:
    """Tiles of this card."""
    if run.device != "cuda":
        print("tuner: needs a card", flush=True)
        return
    minutes = max((run.end - time.monotonic()) / 60 - 1, 1.0)
    tuned = ("--heads", "128", "80", "--bits", "16", "--minutes", f"{min(minutes, 8.0):.1f}")
    script(run, "tuner", 500.0, "tools/tune_kernels.py", *tuned)


def tests(run: Run) -> None:
    """The kernels' tests on the card, in eight processes where pytest-xdist is installed; card.xml has the outcomes."""
    if run.device != "cuda" or importlib.util.find_spec("pytest") is None:
        print("tests: need a card and pytest", flush=True)
        return
    many = ("-n", "8") if importlib.util.find_spec("xdist") is not None else ()
    report = run.out / TESTED
    report.unlink(missing_ok=True)
    script(
        run, "tests", run.first, "-m", "pytest", "-q", "--maxfail=40", *many, "tests/kernels", f"--junitxml={report}"
    )


TESTED = "card.xml"
"""File of the outcomes of the kernels' tests."""


def script(run: Run, name: str, limit: float, *args: str) -> None:
    """Runs Python on ``args`` in the checkout until it ends or ``limit`` seconds are over.

    Shortly before that it is interrupted, so that it can write what it has.
    """
    left = min(limit, run.end - time.monotonic())
    if left < LAST_WORDS + 5:
        run.failures.append(f"{name}: no time was left")
        return
    tool = shutil.which("timeout")
    interrupt = [tool, "-s", "INT", f"{left - LAST_WORDS:.0f}"] if tool is not None else []
    try:
        done = ended([*interrupt, sys.executable, *args], left, {"TRITON_INTERPRET": "0"})
        if done.returncode:
            run.failures.append(f"{name}: ended with {done.returncode}: {done.stderr[-1000:]}")
    except subprocess.TimeoutExpired:
        run.failures.append(f"{name}: stopped after {left:.0f} s")


LAST_WORDS = 15.0
"""Seconds between an interrupt and the end."""


def serve(run: Run) -> None:
    """``serve`` over HTTP: a streamed chat of the demo, where the server's packages are installed or carried."""
    wheels = ROOT / "wheels"
    carried = [str(path) for path in wheels.glob("*.whl")] if wheels.is_dir() else []
    lacking = [name for name in SERVER if importlib.util.find_spec(name) is None]
    if lacking and not carried:
        print(f"serve: this Python lacks {', '.join(lacking)}, and {wheels.name}/ holds no wheels", flush=True)
        return
    out = run.new_file("serve")
    policy = ("--policy", "twin") if run.device == "twin" else ()
    device = "cpu" if run.device == "cpu" else "cuda"
    found = run.child("serve", "gpu.served", str(out), "--device", device, *policy, *carried, out=out, limit=150)
    if found is not None:
        run.values["served"] = int(found["words"] > 0 and found["done"])
        run.notes["served"] = f"ready after {found['ready']:.0f} s, {found['chunks']} chunks"


SERVER = ("fastapi", "uvicorn", "msgspec", "pydantic")
"""Packages that ``serve`` needs beside those of the engine."""


def engine(run: Run) -> None:
    """Ours and transformers in turns."""
    path, out = model_of(run), RESULTS / "engine.json"
    out.unlink(missing_ok=True)
    case = "text-1" if run.smoke else "text-1,text-32,image-1"
    args = ("--model", str(path), "--device", run.torch_device, "--quick", "--only", case)
    found = run.child("engine", "engine", *args, "--sides", "ours,theirs", out=out)
    if found is not None and "text-32" in found["cases"]:
        sides = found["cases"]["text-32"]["sides"]
        ours, reference = (sides[s]["tokens_per_second"] for s in ("ours", "theirs"))
        print(f"engine: 32 texts at once, {ours:.0f} tokens/s, transformers {reference:.0f}", flush=True)


def quantised(run: Run) -> None:
    """Kernels of quantised weights, and a token of the random checkpoint with them beside one in bfloat16."""
    if run.device == "cuda":
        out = RESULTS / "quantised"
        file = out / "kernels.json"
        file.unlink(missing_ok=True)
        found = run.child("quantised", "kernels", "--only", "quantised", "--out", str(out), out=file, limit=240)
        if found is not None:
            run.values |= kernel_values(found["cases"])
    path, taken = model_of(run), dict[str, float]()
    for method in ("", "int8", "int4"):
        setup = replace(run.setup(str(path), 2048, 4 << 30), quantization=method, pixels=SIDE * SIDE)
        probed = run_probe(run, f"three-{method or 'bf16'}", setup)
        if probed is not None and "tpot" in probed:
            taken[method] = probed["tpot"]
    for claim, method in (("tpot8", "int8"), ("tpot4", "int4")):
        if method in taken and taken.get(""):
            run.values[claim] = taken[method] / taken[""]
            run.notes[claim] = f"{1e3 * taken[method]:.2f} ms against {1e3 * taken['']:.2f} ms"


def drafts(run: Run) -> None:
    """Answers that requests predict with every tenth id changed, with drafts and without, at 1 and 128 at a time."""
    out = run.new_file("drafts")
    many = "2" if run.smoke else "128"
    few = ("--pairs", "1", "--out", "12") if run.smoke else ("--pairs", "6")
    args = (str(model_of(run)), "--loads", "prediction", "--predicted", f"1,{many}", "--json", str(out), *few)
    found = run.child("drafts", "speculation", *args, *device_words(run), out=out, limit=300)
    for row in found["rows"] if found is not None else ():
        claim = "drafts1" if row["requests"] == 1 else "drafts128"
        run.values[claim] = row["ratio"]
        run.notes[claim] = f"{row['without']:.0f} and {row['with']:.0f} tokens/s, {row['accepted']} drafts accepted"


def adapters(run: Run) -> None:
    """32 requests of eight adapters beside 32 of the base, and steps while adapters come."""
    path = model_of(run)
    few = ("--rounds", "1", "--length", "4", "--cache", str(64 << 20)) if run.smoke else ("--cache", str(8 << 30))
    rows = "4" if run.smoke else "32"
    for name, more in (("adapters", ("--requests", rows)), ("adapters-loads", ("--loads",))):
        out = run.new_file(name)
        args = (str(path), "--count", "2" if run.smoke else "8", "--json", str(out), *more, *few)
        found = run.child(name, "adapters", *args, *device_words(run), out=out, limit=240)
        if found is None:
            continue
        if "own adapters" in found:
            run.values["adapters32"] = found["own adapters"]
        else:
            run.values["adapter_step"] = max(found.values())
            run.notes["adapter_step"] = ", ".join(f"{kind}: {one:+.1f} ms" for kind, one in found.items())


def device_words(run: Run) -> tuple[str, ...]:
    """Flags of a benchmark that starts an engine of its own."""
    return ("--device", "cpu" if run.device == "cpu" else "cuda", *(("--policy", "twin") * (run.device == "twin")))


PARTS: dict[str, Callable[[Run], None]] = {
    "decode": decode, "layers": layers, "repeats": repeats, "tests": tests, "mixed": mixed, "paces": paces,
    "kernels": kernels, "serve": serve, "three": three, "demo": demo, "quantised": quantised, "counters": counters,
    "tuner": tuner, "engine": engine, "drafts": drafts, "adapters": adapters,
}  # fmt: skip
"""The parts in the order in which they run: values before speed, then by worth."""

TOGETHER = ("decode", "layers", "repeats", "tests")
"""Parts that run at once on a card's machine: they compile most of the time, and nothing of them is timed."""


def card() -> str:
    """The card's name; empty without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "twin", "cpu"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: checks that the parts run, judges nothing")
    parser.add_argument("--minutes", type=float, default=9, help="stop every part after so long")
    parser.add_argument("--no-record", action="store_true", help="do not update the hardware pages")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and kernels.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of hardware.json and hardware.md")
    args = parser.parse_args()
    names = args.only.split(",")
    if wrong := sorted(set(names) - set(PARTS)):
        parser.error(f"unknown part {wrong[0]!r}; known: {', '.join(PARTS)}")
    if args.device == "cuda" and not card():
        print("benchmarks.gpu needs an NVIDIA card; --device twin --smoke runs what needs none", file=sys.stderr)
        return 2
    if args.device != "cuda" and not args.smoke:
        parser.error(f"--device {args.device} only goes with --smoke")
    run = Run(args.device, args.smoke, time.monotonic() + 60 * args.minutes, args.out.resolve())
    run.card = card()
    run.run_parts(PARTS, names, TOGETHER if args.device == "cuda" else ())
    recorded = args.device == "cuda" and not args.smoke and not args.no_record
    speed = ("--speed", str(run.out / "kernels.json")) if run.raw.get("kernels") else ()
    report = run.out / TESTED
    tested = ("--card", str(report), "--name", run.card) if "tests" in names and report.is_file() else ()
    return run.finish(args.docs.resolve() if recorded else None, *speed, *tested)
