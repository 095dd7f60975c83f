"""What quantised weights gain: a token at 1 and 8 requests and a prompt of 512 tokens, against 16 and 32 bits.

python -m benchmarks.quantised [--smoke] [--threads N] [--shape half] [--rounds 5]
                               [--peer llamacpp|openvino --python PATH]
python -m benchmarks.quantised --questions 2000 [--ways "int8,int4,int8 KV"] [--resume]

Random weights (``--load-format dummy``); the ways take turns, so that what else runs on the machine slows all of them.
With ``--peer``: llama.cpp's Q8_0 and Q4_0 take turns with them, on a GGUF file of the same sizes with every matrix in
those bits. PATH is a Python that has llama-cpp-python, built from source so that it is made for this CPU:

  python3 -m venv peer && peer/bin/pip install --no-binary llama-cpp-python llama-cpp-python
  python -m benchmarks.quantised --peer llamacpp --python peer/bin/python

With ``--peer openvino``: OpenVINO GenAI in 16 bits, int8 and int4 takes turns with them: 1, 8 and 32 requests, a prompt
and an image. It runs in process, without HTTP, as these ways do. PATH is a Python of an environment of its own:

  python3 -m venv peer && peer/bin/pip install openvino-genai optimum-intel transformers==5.0.0
  python -m benchmarks.quantised --peer openvino --python peer/bin/python

With ``--questions``: how many of the demo's held-out questions each form answers as 16 bits do.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import held_out_accuracy, llamacpp, openvino_peer
from benchmarks.harness.checkpoints import SHAPES, checkpoint
from benchmarks.harness.llamacpp import LlamaCpp, ids
from benchmarks.harness.openvino_peer import OpenVino
from benchmarks.harness.peer_process import MISSING, PeerMissing
from benchmarks.harness.reporting import BENCH, BUSY, Others, machine, median, table
from trencadis.core.cpu_affinity import available_cpus

WAYS = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
"""Name -> --dtype, --quantization."""

BARS = {
    ("int8", "bfloat16", "token, 1 request"): 0.60, ("int8", "float32", "token, 1 request"): 0.40,
    ("int8", "bfloat16", "token, 8 requests"): 1 / 1.6, ("int8", "bfloat16", "prompt of 512"): 0.75,
    ("int4", "bfloat16", "token, 1 request"): 0.45,
}  # fmt: skip
"""(way, against, figure) -> the most that their ratio may be."""

PEER_BARS = {
    "llamacpp": {("int8", "Q8_0"): 1 / 0.8, ("int4", "Q4_0"): 1 / 0.8},
    "openvino": {("bfloat16", "16 bits"): 1 / 1.05, ("int8", "int8"): 1 / 1.05, ("int4", "int4"): 1 / 1.05},
}
"""Peer -> (way, its form) -> the most that the ratio of a token's times may be, at 1 request."""

PEERS = {"llamacpp": "llama.cpp (llama-cpp-python", "openvino": "OpenVINO GenAI (in process, without HTTP"}
"""Peer -> how the report names it, before its version."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and of answers."""

    short: int = 32
    long: int = 512
    out: int = 24


class Way:
    """One engine and its figures, in milliseconds, one a round."""

    def __init__(self, name: str, model: str, threads: int, sizes: Sizes, many: bool = False) -> None:
        from trencadis import LLM

        dtype, quantization = WAYS[name]
        self.many = many  # measure 32 requests, too
        self.sizes, self.figures = sizes, dict[str, list[float]]()
        begun = time.perf_counter()
        self.llm = LLM(
            model, dtype=dtype, quantization=quantization, load_format="dummy", threads=threads,
            enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20, max_model_len=2 * sizes.long,
        )  # fmt: skip
        self.start = time.perf_counter() - begun
        self.bytes = self.llm.engine.info().weights_bytes

    def round(self, number: int) -> None:
        """One measurement of each figure."""
        s = self.sizes
        for count in (1, 8, 32) if self.many else (1, 8):
            whole, first = self._seconds(count, s.short, s.out, number), self._seconds(count, s.short, 1, number)
            each = (whole - first) / (s.out - 1)
            self._note(f"token, {count} request{'s' if count > 1 else ''}", each)
        self._note(f"prompt of {s.long}", self._seconds(1, s.long, 1, number))

    def _note(self, figure: str, seconds: float) -> None:
        self.figures.setdefault(figure, []).append(1000 * seconds)

    def _seconds(self, count: int, length: int, out: int, seed: int) -> float:
        from trencadis import SamplingParams

        prompts: list[Any] = [{"prompt_token_ids": ids(length, seed, i)} for i in range(count)]
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        begun = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun


def main() -> None:
    """Prints the figures and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one round: that it runs")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--shape", choices=sorted(SHAPES), default="half")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=0, help="ask as many held-out questions instead")
    parser.add_argument(
        "--ways", default=",".join(held_out_accuracy.WAYS), help="forms that are asked, with commas between"
    )
    parser.add_argument("--resume", action="store_true", help="--questions: keep answers, and go on where a run ended")
    parser.add_argument("--peer", choices=("", *PEERS), default="", help="measure it beside these")
    parser.add_argument("--python", default=sys.executable, help="the peer's Python")
    args = parser.parse_args()
    if args.questions:
        print(", ".join(f"{k}: {v}" for k, v in machine().items()))
        kept = BENCH / "results" / f"questions-{args.questions}.json" if args.resume else None
        print(held_out_accuracy.report(args.questions, args.ways.split(","), kept))
        return
    sizes = Sizes(8, 64, 4) if args.smoke else Sizes()
    model, rounds = str(checkpoint("tiny" if args.smoke else args.shape)), 1 if args.smoke else args.rounds
    others, shape = Others(), "tiny" if args.smoke else args.shape
    ways = {name: Way(name, model, args.threads, sizes, args.peer == "openvino") for name in WAYS}
    peers, why = peers_of(args.peer, args.python, shape, args.threads, sizes)
    for number in range(rounds + 1):
        for way in ways.values():
            way.round(number)
        for name, peer in list(peers.items()):
            try:
                peer.round(number, sizes.short, sizes.long, sizes.out)
            except PeerMissing as error:
                why += f"{name}: {error} "
                del peers[name]
    for figures in (*(way.figures for way in ways.values()), *(peer.figures for peer in peers.values())):
        figures.update({figure: found[1:] or found for figure, found in figures.items()})  # the first makes kernels
    print(report(ways, args.threads, others.cores()))
    print(f"\n{peer_report(args.peer, ways, peers, why)}")
    for peer in peers.values():
        peer.close()


def peers_of(
    peer: str, python: str, shape: str, threads: int, sizes: Sizes
) -> tuple[dict[str, LlamaCpp | OpenVino], str]:
    """The peer in each form, and why forms are missing where they cannot run."""
    found, why = dict[str, LlamaCpp | OpenVino](), list[str]()
    if not peer:
        return found, f"no --peer {'|'.join(PEERS)} --python PATH"
    for form in llamacpp.FORMS if peer == "llamacpp" else openvino_peer.FORMS:
        try:
            if peer == "llamacpp":
                found[form] = LlamaCpp(python, form, shape, threads, 2 * sizes.long)
            else:
                found[form] = OpenVino(python, form, shape, threads)
        except PeerMissing as error:
            why.append(f"{form}: {error}")
    return found, "; ".join(why)


def peer_report(peer: str, ways: dict[str, Way], peers: dict[str, LlamaCpp | OpenVino], why: str) -> str:
    """The peer's medians and the ratios that have a bar; ``unproven`` where it did not run."""
    label = PEERS.get(peer, "peers").split(" (")[0]
    if not peers:
        return f"{label}: {MISSING} ({why})"
    figures = list(next(iter(peers.values())).figures)
    rows = [
        (name, round(one.bytes / 2**20), round(one.start, 1), *(median(one.figures[f]) for f in figures))
        for name, one in peers.items()
    ]
    ratios = []
    for (way, form), bar in PEER_BARS[peer].items():
        for figure in (f for f in figures if f in ways[way].figures and form in peers):
            pairs = zip(ways[way].figures[figure], peers[form].figures[figure], strict=True)
            least = bar if figure == "token, 1 request" else ""
            ratios.append((f"{way} / {form}", figure, median(a / b for a, b in pairs), least))
    version = next(iter(peers.values())).version
    return "\n".join([
        f"{PEERS[peer]} {version})", *([f"{MISSING}: {why}"] if why else []), "",
        table(("weights", "MiB", "start s", *(f"{f}, ms" for f in figures)), rows), "",
        table(("ratio", "figure", "median", "at most"), ratios),
    ])  # fmt: skip


def report(ways: dict[str, Way], threads: int, others: float) -> str:
    """Medians, the least of each, and the ratios that have a bar."""
    figures = list(next(iter(ways.values())).figures)
    rows = [
        (name, round(way.bytes / 2**20), round(way.start, 1), *(median(way.figures[f]) for f in figures))
        for name, way in ways.items()
    ]
    lines = [", ".join(f"{k}: {v}" for k, v in machine().items()), f"{threads} threads; others used {others} cores"]
    if others > BUSY:
        lines.append("DISTURBED: others used the machine meanwhile; ratios are of rounds that took turns.")
    lines += ["", table(("weights", "MiB", "start s", *(f"{f}, ms" for f in figures)), rows), ""]
    ratios = []
    for (way, against, figure), bar in BARS.items():
        named = next(f for f in figures if f.split(" of ")[0] == figure.split(" of ")[0])
        pairs = zip(ways[way].figures[named], ways[against].figures[named], strict=True)
        ratios.append((f"{way} / {against}", named, median(a / b for a, b in pairs), bar))
    return "\n".join([*lines, table(("ratio", "figure", "median", "at most"), ratios)])


if __name__ == "__main__":
    main()
