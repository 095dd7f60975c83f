"""Launch times of each stage, for information; this check never fails."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from trencadis.backends.conformance.harness import all_buckets
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.backends.conformance.target import CheckTarget
from trencadis.core.backend import ProgramState
from trencadis.core.buckets import Stage, padded_tokens

UNITS = {Stage.VISION: "slots", Stage.SAMPLE: "rows", Stage.RESET: "rows", Stage.POOL: "rows"}


def speed_sheet(target: CheckTarget) -> str:
    """Times launches of each stage's largest bucket, replayed if the device captures."""
    harness = make_harness(target)
    backend: Any = harness.backend
    lines = []
    for stage in harness.stages:
        bucket = max(all_buckets(harness.plan, stage), key=padded_tokens)
        program = backend.program(bucket, harness.body(bucket))
        inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
        backend.fill(program, inputs)
        harness.prepare(False)
        program.run()
        program.capture()
        took = []
        for _ in range(2 if target.quick else 7):
            begun = time.perf_counter()
            backend.fill(program, inputs)
            (program.replay if program.state is ProgramState.CAPTURED else program.run)()
            backend.synchronize()
            took.append(time.perf_counter() - begun)
        program.release()
        each = median(took)
        rate = f"{padded_tokens(bucket) / each:.0f} {UNITS.get(stage, 'tokens')}/s"
        lines.append(f"{bucket} {1e3 * each:.2f} ms ({rate})")
    return ", ".join(lines)
