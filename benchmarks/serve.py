"""Our server under load: time to first token, time per token, gaps, tokens and images per second, padding, start-up.

python -m benchmarks.serve [--model DIR] [--clients 1,8,32,128] [--loads text,image,edited,plain] [--quick]
                              [--enforce-eager] [--vllm [PYTHON]] [--vllm-flags=FLAGS] [-- FLAGS OF serve]

The server runs as a process on the loopback and is ended afterwards; ``--enforce-eager`` adds a second one without
graphs, ``--vllm`` one of vLLM, from this Python or from one of its own, each started when the one before has ended.
The load ``edited`` asks for a text of the prompt once more, which is what guesses of n-grams are for, where --loads
names it. A model with random weights does not do so: ``benchmarks.harness.checkpoints cycles`` has answers that repeat.
The load ``plain`` sends words without a chat template, whose ids a random model's vocabulary may lack.

Clients are a closed loop, so at the start they all ask at once: the first token then waits for the prompts of others.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.harness.loadgen import Load, drive
from benchmarks.harness.plots import bars
from benchmarks.harness.reporting import RESULTS, Others, report, table
from benchmarks.harness.server import Server, memory_of, serving, vllm_command, vllm_variables

COLUMNS = {
    "clients": "c", "requests": "requests", "errors": "errors", "prompt_tokens": "prompt", "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99", "tpot_p50_ms": "TPOT p50 ms", "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99 ",
    "tokens_per_second": "tokens/s", "images_per_second": "images/s", "real_padded": "real/padded",
}  # fmt: skip
KINDS = ("text", "image", "edited", "plain")
PHASE = re.compile(r"engine: (\w+).*\((\d+\.\d) s\)")
READY = re.compile(r"engine ready on .* after (\d+\.\d) s")


def loads(clients: list[int], quick: bool, side: int, kinds: Sequence[str] = KINDS[:2]) -> list[tuple[str, Load]]:
    """Loads of the kinds for each number of clients; unless ``quick``, every client sends at least two requests."""
    made = []
    for c in clients:
        count = c if quick else max(2 * c, 8)
        of_kind = {
            "text": Load(c, count, words=100, out=64, seed=c),
            "image": Load(c, count, words=12, images=1, side=side, out=32, seed=c + 1),
            "edited": Load(c, count, words=100, out=128, seed=c + 2, edited=True),
            "plain": Load(c, count, words=100, out=64, seed=c, plain=True),
        }
        made += [(kind, of_kind[kind]) for kind in kinds]
    return made


def kinds_of(text: str) -> tuple[str, ...]:
    """The kinds of loads of a list with commas.

    Raises:
        argparse.ArgumentTypeError: one is unknown.
    """
    found = tuple(text.split(","))
    if not {*found} <= {*KINDS}:
        raise argparse.ArgumentTypeError(f"{text!r}: loads are {', '.join(KINDS)}")
    return found


def padding(server: Server) -> tuple[int, int]:
    """Real and padded tokens, slots and rows so far, from ``GET /buckets``; zeros if the server lacks it."""
    answer = httpx.get(server.url + "/buckets", trust_env=False)
    if answer.status_code != 200:
        return 0, 0
    found = answer.json()
    rows = [*found.get("buckets", ()), *found.get("unplanned", ())]
    return sum(r["real_tokens"] for r in rows), sum(r["padded_tokens"] for r in rows)


def measure(server: Server, kind: str, load: Load) -> dict[str, Any]:
    """Runs one load against the server."""
    others, before = Others(), padding(server)
    found = asyncio.run(drive(server.url, server.model(), load))
    real, padded = (b - a for a, b in zip(before, padding(server), strict=True))
    share = real / padded if padded else ""
    return {"kind": kind, **found, "real": real, "padded": padded, "real_padded": share, "others_cores": others.cores()}


def phases(log: str, ready: float) -> dict[str, float]:
    """Seconds at which each start-up phase began, from the server's log, and at which it was ready."""
    found: dict[str, float] = {}
    for name, seconds in PHASE.findall(log):
        found.setdefault(name, float(seconds))
    done = READY.search(log)
    return {**found, **({"engine ready, after": float(done[1])} if done else {}), "ready": ready}


def run(
    name: str,
    flags: list[str],
    args: argparse.Namespace,
    command: list[str] | None = None,
    variables: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Starts one server, runs every load, and stops it."""
    found: list[dict[str, Any]] = []
    with serving(*flags, command=command, variables=variables) as server:
        startup = phases(server.last_words(20_000), server.ready)
        for warm in (Load(1, 2, out=4), Load(1, 2, images=1, side=args.side, out=4, seed=3)):
            asyncio.run(drive(server.url, server.model(), warm))
        for kind, load in loads([int(c) for c in args.clients.split(",")], args.quick, args.side, args.loads):
            found.append({"server": name, **measure(server, kind, load)})
            print(found[-1], file=sys.stderr, flush=True)
        memory = sum(memory_of(pid).get("pss", 0) for pid in server.pids())
    return {"startup": startup, "memory": memory, "loads": found}


def servers(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs every requested server, one after another."""
    model = [args.model] if args.model else []
    kv = [] if any("kv" in f for f in args.flags) else ["--kv-cache-memory-bytes", args.kv]
    alike = ["--no-enable-prefix-caching"] if args.vllm else []  # as vLLM's: a cache of prefixes fills all its memory
    flags = [*model, *kv, *alike, *args.flags]
    found = {"ours": run("ours", flags, args)}
    if args.enforce_eager:
        found["eager"] = run("eager", [*flags, "--enforce-eager"], args)
    if args.vllm:
        theirs = [*model, *shlex.split(args.vllm_flags)]
        found["vllm"] = run("vllm", theirs, args, vllm_command(args.vllm), vllm_variables())
    return found


def against(ours: dict[str, Any], reference: dict[str, Any]) -> str:
    """A table of what ours is of another server's: time to the first token, rates, start-up and memory."""
    keys = ("ttft_p50_ms", "tpot_p50_ms", "tokens_per_second", "images_per_second")
    rows = [
        (f"{a['kind']}, c={a['clients']}", *(f"{a[k] / b[k]:.2f}" if b.get(k) else "" for k in keys))
        for a, b in zip(ours["loads"], reference["loads"], strict=True)
    ]
    start, memory = ours["startup"]["ready"] / reference["startup"]["ready"], ours["memory"] / reference["memory"]
    names = ("ours of vLLM's", "TTFT p50", "TPOT p50", "tokens/s", "images/s")
    return f"{table(names, rows)}\nstart-up {start:.3f}, memory with the cache {memory:.2f} of vLLM's"


def describe_cores() -> str:
    """How many cores vLLM did not compute on (a CPU; cards do not read the variable), for the report."""
    name, reserved = next(iter(vllm_variables().items()))
    return f"vLLM on CPUs: all cores but {reserved} ({name}={reserved}; without the variable it leaves one free)"


def has_vllm(python: str) -> bool:
    """Whether an interpreter finds vLLM; nothing of it is run."""
    requested = [python, "-P", "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"]
    try:
        return subprocess.run(requested, check=False, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder (default: the bundled demo)")
    parser.add_argument("--clients", default="1,8,32", help="concurrent clients; on a card try 1,8,32,128")
    parser.add_argument(
        "--loads", type=kinds_of, default=KINDS[:2], help=f"of {', '.join(KINDS)}; text,image by default"
    )
    parser.add_argument("--side", type=int, default=448, help="pixels of an image's side")
    parser.add_argument("--kv", default="1GiB", help="our KV cache")
    parser.add_argument("--quick", action="store_true", help="one request per client")
    parser.add_argument("--enforce-eager", action="store_true", help="then repeat without graphs")
    parser.add_argument(
        "--vllm", nargs="?", const=sys.executable, default="", metavar="PYTHON",
        help="then repeat with the vLLM of this Python, or of another one, such as that of an environment of its own",
    )  # fmt: skip
    parser.add_argument("--vllm-flags", default="", help="flags of vLLM's server, as one word")
    parser.add_argument("flags", nargs="*", help="after --: flags of our server, such as --device cuda")
    args = parser.parse_args()
    if args.vllm and not args.model:
        parser.error("--vllm needs --model: it does not know the demo by name")
    if args.vllm and not has_vllm(args.vllm):
        parser.error(f"{args.vllm} finds no vLLM; name the python of an environment that has it")
    others = Others()
    found = servers(args)
    all_loads = [row for one in found.values() for row in one["loads"]]
    rows = ([f["server"], f["kind"], *(f[k] for k in COLUMNS)] for f in all_loads)
    text = table(("server", "load", *COLUMNS.values()), rows)
    listed = ((name, phase, at) for name, one in found.items() for phase, at in one["startup"].items())
    text += "\n\n" + table(("server", "start-up phase", "at s"), listed)
    if "vllm" in found:
        text += "\n\n" + against(found["ours"], found["vllm"]) + "\n" + describe_cores()
    bars(RESULTS / "serve.png", "output tokens a second",
         [(f"{f['server']}, {f['kind']}, c={f['clients']}", f["tokens_per_second"]) for f in all_loads])  # fmt: skip
    settings = vars(args) | {"model": args.model or "demo"}
    report("serve", {"settings": settings, **found, "loads": all_loads, "others_cores": others.cores()}, text)
    if any(f["errors"] for f in all_loads):
        sys.exit("some requests failed")


if __name__ == "__main__":
    main()
