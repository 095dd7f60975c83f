"""Whether a device waits for the host: recorded host steps against device steps of a given length.

python -m benchmarks.host.timeline [--rows 256] [--context 1024] [--device-ms 6] [--steps 320] [--depth 1]

The host's steps are those of ``benchmarks.host.step``, measured one by one; the device is a number, by default what a
3B would take at 256 rows. Times are CPU seconds of the thread.
"""

from __future__ import annotations

import argparse
import gc

from benchmarks.harness.reporting import report, table
from benchmarks.host.step import HostSteps, Load
from trencadis.backends.cuda.time_estimates.kernel_times import HostStep, Timeline, simulate_timeline

HEADER = ("rows", "context", "device ms", "host ms, median", "host ms, most", "step ms", "longest wait ms", "idle")


def recorded(load: Load, steps: int, warm: int = 40) -> list[HostStep]:
    """The host's seconds of ``steps`` steps under ``load``."""
    host = HostSteps(load)
    for _ in range(warm):
        host.step()
    gc.collect()
    gc.freeze()
    done = [host.step() for _ in range(steps)]
    gc.unfreeze()
    return [HostStep(d["schedule"] + d["inputs"] + d["fill"], d["update"]) for d in done]


def played(steps: list[HostStep], device: float, depth: int = 1) -> Timeline:
    """``steps`` beside device steps of ``device`` seconds."""
    return simulate_timeline(((step, device) for step in steps), depth)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device-ms", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--depth", type=int, default=1)
    args = parser.parse_args()
    steps = recorded(Load(args.rows, args.context, depth=args.depth), args.steps)
    line = played(steps, args.device_ms / 1e3, args.depth)
    whole = sorted(1e3 * sum(step) for step in steps)
    row = (
        args.rows, args.context, args.device_ms, round(whole[len(whole) // 2], 3), round(whole[-1], 3),
        round(1e3 * line.step, 3), round(1e3 * line.longest, 3), f"{line.idle:.2%}",
    )  # fmt: skip
    cases = {"idle": line.idle, "longest": line.longest, "step": line.step, "host": whole}
    report("host_timeline", {"settings": vars(args), "cases": cases}, table(HEADER, [row]))


if __name__ == "__main__":
    main()
