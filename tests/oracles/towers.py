"""The vision tower on each device, driven launch by launch with poisoned padding, beside transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trencadis.core.backend import BackendConfig
from trencadis.core.buckets import Bucket, Plan, Stage, vision_boundaries
from trencadis.core.checkpoint.reading import load_config
from trencadis.core.launches.persistent import persistent
from trencadis.core.models.registry import build
from trencadis.core.step import Encode
from trencadis.multimodal.colours import CLIP_MEAN, CLIP_STD
from trencadis.multimodal.grids import slots_of
from trencadis.multimodal.qwen2_vl.geometry import PATCH_VALUES

DEVICES = ("cpu", "padded", "hpu")
LARGEST = 8 * 4096
"""Slots of the largest packing: eight images of 64 x 64 patches."""

Grid = tuple[int, int]


@dataclass(frozen=True)
class Picture:
    """Random patches of one grid and what transformers makes of them, float32 [tokens, hidden]."""

    grid: Grid
    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    want: torch.Tensor


class TowerRig:
    """One model on one device: ``cpu`` (every size its own bucket), ``padded`` (the CPU's padded policy) or ``hpu``."""

    def __init__(self, path: Path, device: str) -> None:
        config = load_config(path)
        self.backend = _hpu(config.text.vocab) if device == "hpu" else _cpu(config.text.vocab, device)
        self.model: Any = build(config, self.backend)
        self.model.bind(
            persistent(config, self.backend, blocks=2, block_size=16, arena_rows=LARGEST // 4 + 2, seqs=1, tokens=16)
        )
        listed = tuple(Bucket(Stage.VISION, (s,)) for s in vision_boundaries(LARGEST)) if device == "hpu" else ()
        self.plan = Plan(self.backend.policy, buckets=listed)
        self.program = cache(self._program)

    def _program(self, slots: int) -> Any:
        return self.backend.program(Bucket(Stage.VISION, (slots,)), self.model.vision)

    def worst(self, pictures: Sequence[Picture], rng: np.random.Generator, spare: int = 0) -> float:
        """Largest error of one launch over its pictures, each relative to its oracle's largest value.

        Every place that holds no patch (edge windows, spare windows) gets random bytes and positions; rows of the arena
        are handed out at random, and those that no picture owns must keep their content.
        """
        images, row = [], 2 + rng.permutation(LARGEST // 4)
        for i, p in enumerate(pictures):
            tokens, row = row[: len(p.want)], row[len(p.want) :]
            grid = (1, *p.grid)
            images.append(Encode(str(i), grid, slots_of(grid), p.pixels, tokens.astype(np.int32)))
        bucket = self.plan.fit(Stage.VISION, (sum(i.slots for i in images) + spare,))
        inputs = self.model.pack(images, bucket.dims[0])
        place = np.arange(len(inputs.pixels)) % 64
        empty = place >= np.repeat(inputs.count, 64)
        empty[sum(i.slots for i in images) :] = True
        inputs.pixels[empty] = rng.integers(0, 256, (int(empty.sum()), inputs.pixels.shape[1]), dtype=np.uint8)
        inputs.position[empty] = rng.integers(0, 64, (int(empty.sum()), 2))
        arena = torch.full(tuple(self.model.persistent.arena.shape), 7.0)
        arena[0], arena[1] = 0, float("nan")
        self.model.persistent.arena.copy_(arena)
        program = self.program(bucket.dims[0])
        self.backend.fill(program, inputs)
        program.run()
        got = self.model.persistent.arena.cpu()
        assert (got[row[:500]] == 7).all() and not got[0].any(), "a row that no picture owns was written"
        pairs = zip(images, pictures, strict=True)
        return max(float((got[i.rows.tolist()] - p.want).abs().max() / p.want.abs().max()) for i, p in pairs)


def _cpu(vocab: int, device: str) -> Any:
    from trencadis.backends.cpu import make_backend

    options = {"policy": "padded" if device == "padded" else "serving", "threads": "1"}
    return make_backend(BackendConfig(dtype=torch.float32, block_size=16, vocab_size=vocab, options=options))


def _hpu(vocab: int) -> Any:
    from trencadis.backends.hpu.backend import HpuBackend
    from trencadis.backends.hpu.emulator.device import EmulatedDevice
    from trencadis.backends.hpu.emulator.namespace import of
    from trencadis.backends.hpu.emulator.profiles import profile
    from trencadis.backends.hpu.policy import policy
    from trencadis.backends.hpu.settings import HpuSettings

    cfg = BackendConfig(dtype=torch.float32, block_size=16, vocab_size=vocab)
    return HpuBackend(cfg, policy(""), of(EmulatedDevice(profile("")), True), HpuSettings(fp32_softmax_vision=True))


def normalised(
    pixels: np.ndarray[Any, np.dtype[np.uint8]], colours: tuple[Any, Any] = (CLIP_MEAN, CLIP_STD)
) -> torch.Tensor:
    """float32 [patches, values]: pixel values as the processor of transformers delivers them."""
    mean, std = (torch.tensor(v).repeat_interleave(pixels.shape[1] // 3) for v in colours)
    return (torch.from_numpy(pixels).float() / 255 - mean) / std


def encoded(model: Any, pixels: np.ndarray[Any, np.dtype[np.uint8]], grid: Grid) -> torch.Tensor:
    """transformers' image tokens, float32 [h x w / 4, hidden]."""
    with torch.no_grad():
        out: torch.Tensor = model.model.visual(normalised(pixels), grid_thw=torch.tensor([[1, *grid]])).pooler_output
    return out


def picture(model: Any, grid: Grid, rng: np.random.Generator) -> Picture:
    """A picture of ``grid`` patches (h, w)."""
    pixels = rng.integers(0, 256, (grid[0] * grid[1], PATCH_VALUES), dtype=np.uint8)
    return Picture(grid, pixels, encoded(model, pixels, grid))


def random_grid(rng: np.random.Generator, most: int = 64) -> Grid:
    """Even sides of 2 to ``most`` patches."""
    h, w = (2 * int(n) for n in rng.integers(1, most // 2 + 1, 2))
    return h, w
