"""Measures the backend alone, without an engine: copies, stores, what a released graph gives back.

python -m benchmarks.hpu.device_probe OUT [--rounds 1000] [--large 8589934592]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.reporting import median
from benchmarks.hpu.kernel_times import attention_times, expert_time, found_at_opening, known_lack_of_memory
from trencadis.backends.hpu.fused_experts import check_experts, check_fp8_experts
from trencadis.backends.hpu.sampling_thresholds import find_thresholds
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import (
    Backend,
    BackendConfig,
    HeadTensorsOut,
    LayerKV,
    ProgramState,
    TextTensors,
    load,
)
from trencadis.core.launch_inputs import StepInputs

ROWS, BLOCKS, BLOCK = 64, 2048, 128
HEADS, GROUPS, HEAD_DIM = 28, 4, 128
DECODE = Bucket(Stage.DECODE, (ROWS, BLOCKS))
SMALL = 16 << 20
"""Bytes of the small cache."""


def decode_inputs(seed: int) -> StepInputs:
    """One token of each of ROWS rows; the rows share BLOCKS blocks. All values follow from ``seed``."""
    rng = np.random.default_rng(seed)
    each = BLOCKS // ROWS
    blocks = 2 + (np.arange(ROWS * each, dtype=np.int32).reshape(ROWS, each) % 14)
    return StepInputs(
        tokens=rng.integers(0, 1 << 20, ROWS, dtype=np.int32),
        from_slot=np.zeros(ROWS, np.int32),
        positions=rng.integers(0, 1000, (3, ROWS), dtype=np.int32),
        image_row=np.zeros(ROWS, np.int32),
        out_row=np.arange(1, ROWS + 1, dtype=np.int32),
        row_start=np.arange(ROWS + 1, dtype=np.int32),
        context=rng.integers(0, each * BLOCK - 1, ROWS, dtype=np.int32),
        blocks=blocks,
        slot=np.arange(1, ROWS + 1, dtype=np.int32),
        adapter=np.zeros(ROWS, np.int32),
    )


def echo(x: TextTensors) -> HeadTensorsOut:
    """A body whose answer tells which launch's inputs it read: the token plus its position."""
    return HeadTensorsOut(x.tokens + x.positions[0], None, None, None, None)


class StoreBody:
    """A body that stores K and V of a launch, as every layer does."""

    def __init__(self, backend: Backend, cache_bytes: int) -> None:
        self.ops = backend.ops
        row = GROUPS * HEAD_DIM * backend.dtype.itemsize
        slots = cache_bytes // row // BLOCK * BLOCK
        shape: tuple[int, ...] = (slots, GROUPS, HEAD_DIM)
        if not backend.policy.flat_kv:
            shape = (slots // BLOCK, BLOCK, *shape[1:])
        self.kv = LayerKV(backend.zeros(shape, backend.dtype), backend.zeros(shape, backend.dtype))
        self.q, self.k, self.v = (
            backend.zeros((ROWS, heads, HEAD_DIM), backend.dtype) for heads in (HEADS, GROUPS, GROUPS)
        )
        half = HEAD_DIM // 2
        self.frequency = torch.linspace(1, 0.01, half).to(backend.device)
        self.axis = (torch.arange(half) % 3).to(backend.device)

    def __call__(self, x: TextTensors) -> HeadTensorsOut:
        positions = x.positions[:, : len(x.out_row)]  # inputs of several buckets may share one width
        rotary = self.ops.rotary(positions, self.frequency, self.axis)
        self.ops.rope_store(self.q, self.k, self.v, rotary, self.kv, x.attn)
        return HeadTensorsOut(x.tokens, None, None, None, None)


def ready(backend: Backend, body: Callable[[Any], Any]) -> Any:
    """A program of DECODE, captured where the device has graphs."""
    program = backend.program(DECODE, body)
    program.compile()
    program.capture()
    return program


def wrong_reads(backend: Backend, rounds: int) -> dict[str, float]:
    """Launches without a wait between them, each result read while the next launch is under way."""
    program, pending, wrong = ready(backend, echo), None, {"fetches": 0.0, "fills": 0.0}
    expected: list[Any] = []

    def judge(found: Any) -> None:
        want = expected.pop(0)
        if not np.array_equal(found, want):
            later = any(np.array_equal(found, other) for other in expected)
            wrong["fills" if later else "fetches"] += 1

    for i in range(rounds):
        inputs = decode_inputs(i)
        expected.append(inputs.tokens + inputs.positions[0])
        backend.fill(program, inputs)
        launched = backend.fetch(program.replay(), ROWS)
        if pending is not None:
            judge(pending.result().token)
        pending = launched
    assert pending is not None
    judge(pending.result().token)
    return wrong


def copy_times(backend: Backend, rounds: int) -> dict[str, float]:
    """Microseconds of a fill, and of a fetch of a launch that has ended; medians."""
    program = ready(backend, echo)
    fills, fetches = [], []
    for i in range(max(rounds // 10, 5)):
        inputs = decode_inputs(i)
        backend.synchronize()
        begun = time.perf_counter()
        backend.fill(program, inputs)
        backend.synchronize()
        fills.append(time.perf_counter() - begun)
        out = program.replay()
        backend.synchronize()
        begun = time.perf_counter()
        backend.fetch(out, ROWS).result()
        fetches.append(time.perf_counter() - begun)
    return {"fill_us": 1e6 * median(fills), "fetch_us": 1e6 * median(fetches)}


def store_ratio(backend: Backend, large: int) -> dict[str, float]:
    """Time of a launch that stores into ``large`` bytes over one into SMALL: a store that copies the cache shows."""
    times = {}
    for size in (SMALL, large):
        program, taken = ready(backend, StoreBody(backend, size)), []
        backend.fill(program, decode_inputs(0))
        for _ in range(12):
            backend.synchronize()
            begun = time.perf_counter()
            program.replay()
            backend.synchronize()
            taken.append(time.perf_counter() - begun)
        times[size] = median(taken[2:])
    return {"in_place": times[large] / times[SMALL]}


def record_time(backend: Backend) -> dict[str, float]:
    """Microseconds of a fill while another thread waits for the result of a launch; median."""
    program, large, taken = ready(backend, echo), ready(backend, StoreBody(backend, SMALL)), []
    for i in range(20):
        for _ in range(20):
            out = large.replay()
        pending = backend.fetch(out, ROWS)
        waiting = threading.Thread(target=pending.result)
        waiting.start()
        begun = time.perf_counter()
        backend.fill(program, decode_inputs(i))
        taken.append(time.perf_counter() - begun)
        waiting.join()
        backend.synchronize()
    return {"record_us": 1e6 * median(taken)}


def threshold_time(backend: Any, rows: int, vocab: int) -> dict[str, float]:
    """Milliseconds to find the thresholds of top-k and top-p for drawn rows; median."""
    g = torch.Generator().manual_seed(1)
    probs = torch.softmax(torch.randn(rows, vocab, generator=g) * 4, -1).to(backend.device)
    top_k = torch.full((rows,), 40, dtype=torch.int32).to(backend.device)
    top_p, min_p = (torch.full((rows,), value).to(backend.device) for value in (0.9, 0.0))
    taken = []
    with torch.no_grad():
        for _ in range(7):
            backend.synchronize()
            begun = time.perf_counter()
            with backend.hpu_ops.check_context():
                backend.hpu_ops.region(find_thresholds, probs, top_k, top_p, min_p)
                backend.bridge.mark_step()
            backend.synchronize()
            taken.append(time.perf_counter() - begun)
    return {"thresholds_ms": 1e3 * median(taken[2:])}


def add_one(x: torch.Tensor) -> torch.Tensor:
    """The least that a compiled region can be."""
    return x + 1


def dispatch_time(backend: Any) -> dict[str, float]:
    """Microseconds of the host to dispatch a compiled region; nothing in lazy mode, whose launches are graphs."""
    if backend.hpu_ops.regions is None:
        return {}
    x = torch.zeros(64, dtype=torch.bfloat16, device=backend.device)
    with torch.no_grad(), backend.hpu_ops.check_context():
        for _ in range(3):
            backend.hpu_ops.region(add_one, x)
        begun = time.perf_counter()
        for _ in range(200):
            backend.hpu_ops.region(add_one, x)
        took = time.perf_counter() - begun
    backend.synchronize()
    return {"dispatch_us": 1e6 * took / 200}


def expert_checks(backend: Any) -> dict[str, float]:
    """1 where the plug-in's operation for experts has the values of the product over all, in 16 and in 8 bits."""
    ops, bridge = backend.hpu_ops, backend.bridge
    return {
        "experts": float(bridge.experts is not None and check_experts(ops)),
        "fp8_experts": float(bridge.fp8_experts is not None and check_fp8_experts(ops)),
    }


def returned(backend: Backend) -> dict[str, float]:
    """Share of a graph's bytes that its release gives back; nothing where the device has no graphs."""
    program = ready(backend, StoreBody(backend, SMALL))
    if program.state is not ProgramState.CAPTURED:
        return {}
    before = backend.memory.free()
    held = program.bytes
    program.release()
    graph = held - program.bytes
    return {"released": min(backend.memory.free() - before, graph) / graph if graph else 1.0}


def measure(file: Path, rounds: int, large: int) -> None:
    """Writes ``file`` after each figure and names failed ones in ``failed``."""
    backend: Any = load("hpu")(BackendConfig(torch.bfloat16, BLOCK, max_rows=ROWS, vocab_size=1 << 20))
    found: dict[str, Any] = {"device": backend.bridge.device_name(), "notes": backend.notes, "failed": {}}
    found["memory"] = {"free": backend.memory.free(), "total": backend.memory.total()}
    whole = rounds > 100
    figures: tuple[Callable[[], dict[str, float]], ...] = (
        lambda: wrong_reads(backend, rounds), lambda: copy_times(backend, rounds),
        lambda: store_ratio(backend, large), lambda: returned(backend), lambda: record_time(backend),
        lambda: threshold_time(backend, 32, 151_936 if whole else 999), lambda: dispatch_time(backend),
        lambda: expert_checks(backend), lambda: found_at_opening(backend), lambda: known_lack_of_memory(backend),
        lambda: attention_times(backend, BLOCKS if whole else ROWS),
        lambda: expert_time(backend, *((128, 2048, 768) if whole else (4, 64, 32))),
    )  # fmt: skip
    names = ("reads", "copies", "stores", "release", "events", "thresholds", "dispatch", "experts", "opening", "memory",
             "attention", "expert time")  # fmt: skip
    for name, figure in zip(names, figures, strict=True):
        try:
            found |= figure()
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {error}"
        file.write_text(json.dumps(found))


def main() -> None:
    """Writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=1000, help="launches whose results are checked")
    parser.add_argument("--large", type=int, default=8 << 30, help="bytes of each tensor of the large cache")
    args = parser.parse_args()
    measure(args.out, args.rounds, args.large)


if __name__ == "__main__":
    main()
