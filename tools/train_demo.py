#!/usr/bin/env python3
"""Trains, evaluates and exports the bundled demo checkpoint.

python tools/train_demo.py train --minutes 90 --slice-minutes 20    # run again to resume
python tools/train_demo.py tune --steps 210 --slice-minutes 5       # teaches the exported files JSON; resumes too
python tools/train_demo.py export                                   # to assets/demo
python tools/train_demo.py eval                                     # prints the results of the exported files
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="run one slice of the training")
    train.add_argument("--minutes", type=float, default=90.0, help="planned wall time over all slices")
    train.add_argument("--slice-minutes", type=float, default=1e9, help="wall time of this slice")
    train.add_argument("--processes", type=int, default=2)
    export = commands.add_parser("export", help="write the checkpoint")
    export.add_argument("--check", action="store_true", help="compare logits with transformers")
    evaluate = commands.add_parser("eval", help="ask held-out questions of the exported checkpoint")
    evaluate.add_argument("--questions", type=int, default=2000)
    evaluate.add_argument("--intents", action="store_true", help="also print a line for every intent")
    evaluate.add_argument("--transformers", type=int, default=0, help="also ask transformers this many of them")
    tune = commands.add_parser("tune", help="run one slice of the tuning on JSON")
    tune.add_argument("--steps", type=int, default=210, help="planned steps over all slices")
    tune.add_argument("--slice-minutes", type=float, default=1e9, help="wall time of this slice")
    tune.add_argument(
        "--source", type=Path, default=ROOT / "assets" / "demo", help="folder of the checkpoint to start from"
    )
    for command in (train, export, tune):
        command.add_argument("--run", type=Path, default=ROOT / ".train", help="folder of the run's state")
    for command in (export, evaluate, tune):
        command.add_argument("--out", type=Path, default=ROOT / "assets" / "demo", help="folder of the checkpoint")
    args = parser.parse_args()
    if args.command == "train":
        from demo.training import Plan
        from demo.training import train as run

        run(Plan(args.run, args.minutes, args.slice_minutes, args.processes))
    elif args.command == "tune":
        from demo.tuning import Tuning
        from demo.tuning import tune as tune_json

        tune_json(Tuning(args.source, args.out, args.run, args.steps, args.slice_minutes))
    elif args.command == "export":
        from demo.export import export as write

        write(args.run / "state.pt", args.out, args.check)
    else:
        from demo.evaluate import report

        print(report(args.out, args.questions, args.intents))
        if args.transformers:
            from demo.oracle import agreement

            print("\n" + agreement(args.out, args.transformers))


if __name__ == "__main__":
    main()
