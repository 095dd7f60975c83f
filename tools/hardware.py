"""Writes ``docs/hardware.md``: what is proven of each CUDA kernel, and by which record.

    python tools/hardware.py [--interpreter JUNIT.xml ...] [--card JUNIT.xml --name "NVIDIA H100 ..."]
                             [--ahead RESOURCES.json ...] [--speed kernels.json] [--measured gpu.json] [--docs DIR]
                             --write

Records are merged into ``docs/hardware.json``: pytest's ``--junitxml`` of tests/kernels under the interpreter or on a
card, what ``tools/kernel_resources.py --json`` compiled, what ``benchmarks.kernels``, ``benchmarks.gpu`` and
``benchmarks.hpu`` measured. The page lists what has no record with the command that makes one.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.claims import CLAIMS as GPU_CLAIMS  # noqa: E402
from benchmarks.harness.claims import Claim, command_of  # noqa: E402
from benchmarks.hpu.claims import CLAIMS as HPU_CLAIMS  # noqa: E402

MEASURED = {"gpu": "measured", "hpu": "measured_gaudi"}
"""Where the record keeps what each benchmark measured."""

DOCS, RECORD, PAGE = ROOT / "docs", "hardware.json", "hardware.md"


@dataclass(frozen=True)
class Kernel:
    """A row of the page: the kernel's file, its jit functions, its test files, and its name in the benchmark."""

    name: str
    file: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    speed: str


ATTENTION = ("test_attention",)
KERNELS = (
    Kernel("attention over work items", "paged_attention", ("items_kernel",), ATTENTION, "attend_prefill"),
    Kernel("attention that turns and stores", "layers/fused_decode_attention", ("turned_items_kernel",),
           ("test_whole_layer",), ""),
    Kernel("the same of several tokens a row", "layers/fused_verify_attention", ("verify_items_kernel",),
           ("test_verify_layer",), ""),
    Kernel("products of few rows", "layers/skinny_gemm", ("skinny_kernel",), ("test_whole_layer",), ""),
    Kernel(
        "products of few rows with codes", "layers/skinny_quantised_gemm", ("coded_skinny_kernel",),
        ("test_coded_layer",), ""
    ),
    Kernel("activations rounded, within norms and SiLU or alone", "activation_rounding", ("rounded_rows_kernel",),
           ("test_activation_rounding", "test_coded_layer"), ""),
    Kernel("a dependent launch, tried at the start", "layers/dependent_launch", ("_probe_kernel",),
           ("test_bad_input",), ""),
    Kernel("weights decoded once", "quantised_linear", ("decoding_kernel",), ("test_decoding",), ""),
    Kernel("sums over ranks", "peers/one_shot_reduce", ("peer_sum_kernel",), ("test_peer_sums",), ""),
    Kernel("sums over ranks in two steps", "peers/two_shot_reduce", ("peer_shares_kernel",), ("test_peer_shares",), ""),
    Kernel("joins of cut keys", "paged_attention", ("join_kernel",), ATTENTION, "attend_decode"),
    Kernel("vision windows", "vision_attention", ("windows_kernel",), ATTENTION, "attend_windows"),
    Kernel("vision images", "vision_attention", ("images_kernel",), ATTENTION, "attend_images"),
    Kernel("images in the arena", "cross_attend", ("pictures_kernel", "pictures_join_kernel"),
           ("test_attend_pictures",), ""),
    Kernel("rotary and store", "rotary_kernels", ("rotary_kernel", "rope_kernel"), ATTENTION, "rope"),
    Kernel("RMS norm with residual", "norms", ("_rms_norm",), ("test_small_ops",), "norm"),
    Kernel("gates of rows, behind a norm or alone", "norms", ("_gate_rows",), ("test_small_ops",), ""),
    Kernel("layer norm with residual", "norms", ("_layer_norm",), ("test_small_ops",), ""),
    Kernel("SiLU and product", "activation", ("_silu_mul",), ("test_small_ops",), "silu"),
    Kernel("activations", "activation", ("_act",), ("test_small_ops",), ""),
    Kernel("embeddings", "input_embeddings", ("_embed",), ("test_small_ops",), "embed"),
    Kernel("gather and scatter rows", "gather_scatter", ("_gather", "_scatter", "_mix"), ("test_small_ops",), "rows"),
    Kernel("patches", "input_embeddings", ("_patches",), ("test_small_ops",), "patches"),
    Kernel("sampler reset", "sample", ("_reset",), ("test_small_ops",), ""),
    Kernel("quantised products", "quantised_linear", ("quantised_kernel", "added_kernel"),
           ("test_quantised",), "quantised"),
    Kernel("experts", "fused_moe", ("experts_kernel", "experts_down_kernel", "experts_sum_kernel"),
           ("test_experts_kernels",), ""),
    Kernel("experts by codes", "quantised_fused_moe",
           ("coded_experts_kernel", "coded_experts_down_kernel", "gather_pairs_kernel"),
           ("test_quantised_experts",), ""),
    Kernel("routes to experts", "fused_moe", ("route_kernel", "count_kernel", "place_kernel", "route_few_kernel"),
           ("test_experts_kernels",), ""),
    Kernel("8-bit KV cache", "quantised_kv_attention", ("codes_kernel",), ("test_kv_codes",), ""),
    Kernel("adapters", "lora_shrink_expand", ("_shrink", "_expand"), ("test_adapters",), ""),
    Kernel("causal convolution", "causal_conv", ("conv_kernel", "conv_state_kernel", "conv_step_kernel"),
           ("test_recurrent",), ""),
    Kernel("gated delta rule", "delta_rule", ("step_kernel", "squares_kernel", "scan_kernel"),
           ("test_recurrent",), ""),
    Kernel("gated DeltaNet of single tokens", "delta_net_step", ("net_kernel",), ("test_recurrent_layer",), ""),
    Kernel("head, greedy", "sample_chunk_summaries", ("greedy_parts_kernel", "greedy_pick_kernel"),
           ("test_head",), "head_greedy"),
    Kernel("head, full", "sample", ("parts_kernel", "draw_kernel", "told_kernel"), ("test_head",), "head"),
)  # fmt: skip

COMMANDS = """
On a machine with an NVIDIA card (compute capability 8.0 or newer, torch 2.11 or newer, triton), from a checkout:

    export PYTHONPATH=$PWD TRITON_INTERPRET=0
    python3 -P -m benchmarks.gpu --out out --docs out                            # nine minutes, values first
    python3 -P -m benchmarks.gpu --only three,demo,quantised --minutes 4 --out more --docs more
    python3 -P -m trencadis.server check-device cuda                             # each kernel in bfloat16, a graph
    python3 -m pytest tests/cuda/test_card.py                                    # graphs, memory: alone on the card
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1                                      # for the next command alone: bounds
    compute-sanitizer --tool memcheck python3 -m pytest tests/kernels/test_attention.py -k "test_text or test_vision"
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    python3 -P -m benchmarks.gpu --only counters,tuner --out more --docs more    # counters of ncu, tiles of this card
    python3 -P -m benchmarks.gpu --only engine,drafts,adapters --out more --docs more

The first command is sized for a card that is lent for a quarter of an hour: 16 cores, one H200, at most ten minutes a
command. It measures values of everything at once, in some twelve processes that compile most of the time (limit: four
minutes), then speed, alone on the card: mixed requests, TTFT and TPOT with the kernels of each load, kernels beside
torch's, and `serve` where the server's packages are. The second one takes what is left of the quarter. Each line of
figures is in `out/gpu.json` after its part, though the next part dies; the folder holds five files at the end:
`gpu.json`, `kernels.json`, `card.xml` of the tests, and this page anew with its records. Where those cannot replace the
page at once, because nothing that is written stays there, they are entered afterwards, from any machine:

    python tools/hardware.py --measured out/gpu.json --speed out/kernels.json --card out/card.xml --name CARD --write
    python tools/hardware.py --measured more/gpu.json --write

`tests/kernels` alone is `python3 -m pytest -n 8 tests/kernels --junitxml card.xml`; with `-m "long or not long"` it
runs every combination of head, group, block and dtype: some 5,000 compilations, an hour on one core. `card.xml` is
written at the end, also where SIGINT is what ends the run (`timeout -s INT 570` before the command). Without
PYTORCH_NO_CUDA_MEMORY_CACHING torch cuts tensors out of large pieces of memory, and memcheck sees the bounds of those
alone.
"""


def outcomes(files: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Passed, failed and skipped cases by test file."""
    found: dict[str, Counter[str]] = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            name = case.get("classname", "").split(".")[-1]
            kinds = {child.tag for child in case}
            result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found.setdefault(name, Counter())[result] += 1
    return {name: dict(count) for name, count in sorted(found.items())}


def resources(files: Iterable[Path]) -> dict[str, dict[str, dict[str, int]]]:
    """By function and architecture: launches that compile, launches that do not, most registers, most stack bytes."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for file in files:
        for r in json.loads(file.read_text(encoding="utf-8")):
            at = found.setdefault(r["kernel"], {}).setdefault(f"sm_{r['arch']}", dict.fromkeys(FIGURES, 0))
            at["failed" if r["error"] else "compiled"] += 1
            at["registers"] = max(at["registers"], r["registers"])
            at["stack"] = max(at["stack"], r["stack"])
    return found


FIGURES = ("compiled", "failed", "registers", "stack")


def merge(record: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """``record`` with the records that ``args`` name merged in."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    if args.interpreter:
        import triton

        tests = {
            **record.get("interpreter", {}).get("tests", {}),
            **outcomes(args.interpreter),
        }  # keeps files that were not run
        record["interpreter"] = {"date": today, "triton": triton.__version__, "tests": tests}
    if args.ahead:
        record.setdefault("ahead", {}).update(resources(args.ahead))
    if args.card:
        assert args.name, "--card needs --name, the card's name"
        record.setdefault("cards", {})[args.name] = {"date": today, "tests": outcomes(args.card)}
    if args.speed:
        measured = json.loads(args.speed.read_text(encoding="utf-8"))
        best: dict[str, float] = {}
        for row in (r for r in measured["cases"] if "share" in r):
            best[row["kernel"]] = max(best.get(row["kernel"], 0.0), row["share"])
        name = measured["machine"]["card"].partition(",")[0]  # the name; driver, power and clocks follow
        record.setdefault("speed", {})[name] = {"date": today, "best_share": best}
    if args.measured:
        found = json.loads(args.measured.read_text(encoding="utf-8"))
        assert found["machine"]["card"] and not found["smoke"], "only what a card measured is recorded"
        kind = MEASURED[found.get("kind", "gpu")]
        at = record.setdefault(kind, {}).setdefault(found["machine"]["card"], {})
        at.update({name: {**claim, "date": today} for name, claim in found["claims"].items()})
    return record


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    ahead, interpreted = record.get("ahead", {}), record.get("interpreter", {})
    lines = ["# Hardware: what is proven of each CUDA kernel", "", *INTRODUCTION.splitlines(), ""]
    lines += ["| kernel | interpreter | ahead of time | values on a card | speed |", "|---|---|---|---|---|"]
    for k in KERNELS:
        shown = tests_cell(k, interpreted.get("tests", {})), ahead_cell(k, ahead)
        cells = [*shown, card_cell(k, record), speed_cell(k, record)]
        lines.append(f"| {k.name} (`{k.file}.py`) | " + " | ".join(cells) + " |")
    if interpreted:
        lines += ["", f"Interpreter: triton {interpreted['triton']}, {interpreted['date']}."]
    if not record.get("cards"):
        lines += ["", *NO_CARD.splitlines()]
    else:
        lines += ["", "To prove it on another card:"]
    lines += [COMMANDS, "## What is claimed of an NVIDIA card", "", *CLAIMED.splitlines(), ""]
    lines += [*claims(GPU_CLAIMS, record.get("measured", {})), "## What is claimed of a Gaudi", ""]
    return "\n".join([*lines, *GAUDI.splitlines(), "", *claims(HPU_CLAIMS, record.get("measured_gaudi", {}))])


def claims(known: Sequence[Claim], measured: dict[str, dict[str, Any]]) -> list[str]:
    """The table of claims about a card as a whole."""
    lines = ["| claim | bar | state | command |", "|---|---|---|---|"]
    for c in known:
        shown = [figure(c, card, found[c.id]) for card, found in sorted(measured.items()) if c.id in found]
        lines.append(f"| {c.text} | {c.wanted} | {'; '.join(shown) or 'unproven'} | `{c.command}` |")
    return [*lines, ""]


def figure(claim: Claim, card: str, found: dict[str, Any]) -> str:
    """A claim's verdict and figure on one card."""
    verdict = "holds" if found["passed"] else "**fails**"
    note = f" ({found['note']})" if found["note"] else ""
    return f"{verdict} on {card}, {found['date']}: {found['value']:.3g}{claim.unit}{note}"


NO_CARD = """**No kernel has run on a card so far: nothing here is a measured speed, and values, races and waits are
shown only as far as the columns say.** What would show the rest:"""

CLAIMED = f"""One command measures most of it in nine minutes and enters it here: `{command_of("benchmarks.gpu")}`.
`--only` runs the parts that it had no time for. It needs no network, no server packages and no installation of this
project; what a card has not measured is unproven."""

GAUDI = f"""No Gaudi has been reached so far, so every row is an open question. One command measures all of it in ten
minutes at most and enters it here: `{command_of("benchmarks.hpu")}`. It needs no network, no server packages and no
transformers; `--smoke` runs it on an emulated card and judges nothing."""

INTRODUCTION = """Written by `tools/hardware.py` from records (`docs/hardware.json`). Interpreter: values against the
reference on CPU tensors, with every address checked and the grid walked in several orders; test cases passed / failed
of the files that hold the kernel. Ahead of time: launches compiled for six architectures, most registers of a thread,
bytes spilled, float32 included (`docs/kernels.csv` lists each)."""


def tests_cell(k: Kernel, tests: dict[str, dict[str, int]]) -> str:
    """Passed / failed cases of the kernel's test files."""
    count: Counter[str] = Counter()
    for name in k.tests:
        count.update(tests.get(name, {}))
    return f"{count['passed']} / {count['failed']}" if count else "not recorded"


def ahead_cell(k: Kernel, ahead: dict[str, dict[str, dict[str, int]]]) -> str:
    """Compilations over the supported architectures."""
    rows = [r for f in k.functions for r in ahead.get(f, {}).values()]
    if not rows:
        return "not recorded"
    bad, stack = sum(r["failed"] for r in rows), max(r["stack"] for r in rows)
    text = f"{sum(r['compiled'] for r in rows)} compiled, {max(r['registers'] for r in rows)} registers"
    text += f", {stack} bytes spilled at most" if stack else ", none spilled"
    return text + (f", **{bad} fail**" if bad else "")


def card_cell(k: Kernel, record: dict[str, Any]) -> str:
    """Results of the kernel's tests, by card."""
    names = record.get("cards", {}).items()
    return "; ".join(f"{name}: {tests_cell(k, card['tests'])}" for name, card in names) or "no"


def speed_cell(k: Kernel, record: dict[str, Any]) -> str:
    """Best share of the measured ceiling, by card."""
    found = [(name, s["best_share"].get(k.speed)) for name, s in record.get("speed", {}).items()]
    return "; ".join(f"{name}: {share:.0%}" for name, share in found if share is not None) or "no"


def main() -> int:
    """Runs the command line: merges records, then prints the page or writes both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--interpreter", type=Path, nargs="*", default=[])
    parser.add_argument("--card", type=Path, nargs="*", default=[])
    parser.add_argument("--name", default="", help="the card's name, with --card")
    parser.add_argument("--ahead", type=Path, nargs="*", default=[])
    parser.add_argument("--speed", type=Path)
    parser.add_argument("--measured", type=Path, help="gpu.json or hpu.json of benchmarks.gpu and .hpu")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of hardware.json and hardware.md")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    own = args.docs / RECORD
    source = own if own.is_file() else DOCS / RECORD
    record = merge(json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}, args)
    if args.write:
        args.docs.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (args.docs / PAGE).write_text(page(record), encoding="utf-8")
    else:
        print(page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
