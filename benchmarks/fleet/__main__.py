"""``python -m benchmarks.fleet``: hit shares and times to a first token of the product's router and of simpler ones.

python -m benchmarks.fleet [--replicas 8 64 1000] [--requests 200000] [--rate 8] [--seed 1] [--policies router ...]
    [--exact]

Every figure but the decision's is of simulated time; the same seed gives the same.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.replica_costs import Machine
from benchmarks.fleet.simulate import simulate, simulate_exactly
from benchmarks.harness.reporting import quantile, report, table
from benchmarks.traces.sessions import sessions

MOST_EXACT = 16
"""Replicas of ``--exact``."""

HEADER = (
    "replicas", "policy", "hit share", "TTFT p50 ms", "TTFT p99 ms", "encoded/distinct", "decision p50 us",
    "decision p99 us", "cpu s",
)  # fmt: skip


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second and replica")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=[*POLICIES])
    parser.add_argument("--exact", action="store_true", help="the product's scheduler in each of at most 16 replicas")
    args = parser.parse_args()
    if args.exact and max(args.replicas) > MOST_EXACT:
        parser.error(f"--exact runs at most {MOST_EXACT} replicas; the fast model runs any number.")
    run = simulate_exactly if args.exact else simulate
    rows, machine = [], Machine()
    for replicas in args.replicas:
        for name in args.policies:
            begun = time.process_time()
            trace = sessions(args.seed, args.requests, args.rate * replicas)
            out = run(trace, POLICIES[name](replicas, machine, args.seed), machine)
            rows.append((
                replicas, name, round(out.hit_share, 3), round(1e3 * out.quantile(0.5), 1),
                round(1e3 * out.quantile(0.99), 1), round(out.encoded / max(len(out.distinct), 1), 3),
                round(1e6 * quantile(out.decisions, 0.5), 1), round(1e6 * quantile(out.decisions, 0.99), 1),
                round(time.process_time() - begun, 1),
            ))  # fmt: skip
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {**vars(args), "rows": rows, "peak_bytes": peak}
    report("fleet", result, table(HEADER, rows))


if __name__ == "__main__":
    main()
