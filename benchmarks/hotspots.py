"""Profiles one case: torch operators, most expensive first.

python -m benchmarks.hotspots [--case text-1] [--threads 1] [--side ours]
"""

from __future__ import annotations

import argparse

from benchmarks.engine import CASES
from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.compared_engines import SIDES, Setup, Work, run
from trencadis.core.cpu_affinity import available_cpus


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="text-1", choices=CASES)
    parser.add_argument("--model", default="half")
    parser.add_argument("--side", default="ours", choices=("ours", "theirs"))
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rows", type=int, default=30)
    args = parser.parse_args()
    from torch.profiler import ProfilerActivity, profile

    model = str(checkpoint(args.model))
    side = SIDES[args.side](Setup(model, args.threads))
    run(side, Work(1, 2, words=8, images=1, seed=99))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        done = run(side, CASES[args.case][1])
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=args.rows, max_name_column_width=48))
    shapes = profiler.key_averages(group_by_input_shape=True)
    print(shapes.table(sort_by="self_cpu_time_total", row_limit=args.rows // 2, max_name_column_width=48))
    print(f"{done.seconds:.2f} s with the profiler, CPU {done.cpu:.2f} s")


if __name__ == "__main__":
    main()
