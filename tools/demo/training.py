"""The training run: two processes of one thread each, a schedule in wall time, and slices that resume."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from demo import losses
from demo.language import tokenizer
from demo.model import DemoModel, initialise
from demo.optimiser import Optimiser, Slot, slots
from demo.packing import Encoder, patchify
from demo.sampling import Mix, make_image, training_batch, vision_batch

VISION_SHARE = 0.09  # of the planned time, on cells alone


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    folder: Path
    minutes: float  # planned for all slices together
    slice_minutes: float
    processes: int = 2
    seed: int = 0
    save_seconds: float = 120.0


@dataclass
class Shared:
    """Memory that the processes share."""

    flat: Tensor  # [values] float32 parameters
    first: Tensor
    second: Tensor
    grads: list[Tensor]  # one [values] float32 per process
    clock: Tensor  # [4] float64: seconds trained, steps, joint steps, stop


@dataclass(frozen=True)
class Rates:
    """Learning rates at one moment."""

    vision_only: bool
    muon: float
    adam: float
    vision: float
    auxiliary: float
    progress: float  # of the stage


def rates(progress: float) -> Rates:
    """The schedule, over the fraction of the planned time."""
    if progress < VISION_SHARE:
        p = progress / VISION_SHARE
        warm = min(1.0, p / 0.03 + 0.05)
        return Rates(True, 0.02 * warm * (1 - 0.6 * p), 3e-3 * warm, 1.0, 1.0, p)
    p = min(1.0, (progress - VISION_SHARE) / (1 - VISION_SHARE))
    warm = min(1.0, p / 0.01 + 0.05)
    rest = max(0.0, 1 - p)
    return Rates(False, 0.013 * warm * rest, 3e-3 * warm * rest, 0.8, max(0.1, 0.5 - 0.5 * p), p)


def load_flat(model: DemoModel, layout: list[Slot], flat: Tensor) -> None:
    """Copies the flat values into the model's parameters, whatever their type."""
    named = dict(model.named_parameters())
    for slot in layout:
        named[slot.name].data.copy_(slot.view(flat))


def fresh(seed: int) -> DemoModel:
    """A model with starting values."""
    rng = Random(seed)
    sample = [patchify(make_image((4, 4), rng, Mix()).pixels) for _ in range(400)]
    model = DemoModel()
    initialise(model, torch.from_numpy(np.concatenate(sample)), seed)
    return model


def save_state(path: Path, shared: Shared) -> None:
    """Writes the state to a temporary file and renames it, so that the file is always complete."""
    part = path.with_suffix(".part")
    torch.save({"flat": shared.flat, "first": shared.first, "second": shared.second, "clock": shared.clock}, part)
    os.replace(part, path)


def _open(plan: Plan, layout: list[Slot]) -> Shared:
    size = sum(s.size for s in layout)
    path = plan.folder / "state.pt"
    if path.exists():
        state = torch.load(path)
        flat, first, second, clock = (state[k] for k in ("flat", "first", "second", "clock"))
        if len(flat) != size:
            raise SystemExit(f"{path} belongs to another model")
        clock[3] = 0
    else:
        named = dict(fresh(plan.seed).named_parameters())
        flat = torch.cat([named[s.name].detach().reshape(-1) for s in layout])
        first, second, clock = torch.zeros(size), torch.zeros(size), torch.zeros(4, dtype=torch.float64)
    grads = [torch.zeros(size) for _ in range(plan.processes)]
    for tensor in (flat, first, second, clock, *grads):
        tensor.share_memory_()
    return Shared(flat, first, second, grads, clock)


class Log:
    """Means since the last line, printed and appended to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: dict[str, list[float]] = defaultdict(list)
        self.last = time.monotonic()

    def add(self, notes: dict[str, float]) -> None:
        """Adds the figures of one step."""
        for key, value in notes.items():
            self.sums[key].append(value)

    def line(self, head: dict[str, float]) -> None:
        """Writes one line."""
        means = {k: round(sum(v) / len(v), 4) for k, v in sorted(self.sums.items())}
        text = json.dumps({**head, **means})
        print(text, flush=True)
        with self.path.open("a") as f:
            f.write(text + "\n")
        self.sums.clear()
        self.last = time.monotonic()


def _loss(
    model: DemoModel, now: Rates, rng: Random, encode: Encoder, labels: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    if not now.vision_only:
        batch = training_batch(rng, encode, Mix(), now.progress, 2600.0)
        return losses.joint(model, batch, labels, now.auxiliary)
    grid, images = vision_batch(rng, Mix(), now.progress, 450.0)
    patches = torch.from_numpy(np.stack([patchify(p.pixels) for p in images]))
    features = model.vision(patches.to(model.embed.dtype), grid)
    what, colour, centre = (
        torch.from_numpy(np.stack([getattr(p, k) for p in images])) for k in ("what", "colour", "centre")
    )
    return losses.cells(model, features, what, colour, centre, grid, labels)


def worker(rank: int, plan: Plan, shared: Shared, barrier: Any) -> None:
    """One process of the run."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    words = tokenizer.build()
    encode, labels = Encoder(words), losses.label_ids(words)
    model = DemoModel().bfloat16()
    layout = slots(model)
    named = dict(model.named_parameters())
    optimiser = Optimiser(layout, shared.flat, shared.first, shared.second, rank, plan.processes)
    log = Log(plan.folder / "log.jsonl")
    started, before = time.monotonic(), float(shared.clock[0])
    saved = started
    while not shared.clock[3]:
        step = int(shared.clock[1])
        now = rates(float(shared.clock[0]) / (plan.minutes * 60))
        load_flat(model, layout, shared.flat)
        loss, notes = _loss(model, now, Random(f"{plan.seed} {step} {rank}"), encode, labels)
        loss.backward()
        mine = shared.grads[rank]
        for slot in layout:
            grad = named[slot.name].grad
            target = slot.view(mine)
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad)
            named[slot.name].grad = None
        if not torch.isfinite(loss):
            raise RuntimeError(f"loss is {float(loss)} at step {step}")
        log.add(notes)
        barrier.wait()
        optimiser.step(shared.grads, now.muon, now.adam, now.vision, step + 1, now.vision_only)
        barrier.wait()
        if rank == 0:
            at = time.monotonic()
            shared.clock[0] = before + at - started
            shared.clock[1] += 1
            shared.clock[2] += 0 if now.vision_only else 1
            over = at - started > plan.slice_minutes * 60 or float(shared.clock[0]) > plan.minutes * 60
            shared.clock[3] = 1 if over else 0
            if over or at - saved > plan.save_seconds:
                save_state(plan.folder / "state.pt", shared)
                saved = at
            if over or at - log.last > 30:
                log.line({"min": round(float(shared.clock[0]) / 60, 2), "step": step, "muon": round(now.muon, 5)})
        barrier.wait()


def train(plan: Plan) -> None:
    """Runs one slice."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    shared = _open(plan, slots(DemoModel()))
    barrier = mp.get_context("spawn").Barrier(plan.processes)
    mp.spawn(worker, args=(plan, shared, barrier), nprocs=plan.processes)
