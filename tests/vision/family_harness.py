"""A tower on each device, launch by launch with poisoned padding: what every vision family is checked with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.oracles.transformers_model import make_image
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import reserved_rows
from trencadis.core.checkpoint.model_registry import image_processor
from trencadis.core.device.backend import BackendConfig
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.memory.memory_estimator import arena_width
from trencadis.core.models.model_loader import load_model
from trencadis.core.shapes.bucket_options import vision_boundaries
from trencadis.core.step import Encode

DEVICES = ("cpu", "padded", "hpu", "twin")
VARIANTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "padded, chunks of 7": {"policy": "padded", "max_num_batched_tokens": 7, "max_num_seqs": 2},
    "arena of two": {"encoder_cache_images": 2, "enable_prefix_caching": False},
    "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64},
    "cuda twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "block_size": 16},
}
"""Devices and schedules of the same chats, as arguments of ``LLM``."""
Given = tuple[int, tuple[int, int, int], int, np.ndarray[Any, np.dtype[np.uint8]]]
"""Arena rows of an item, its grid, slots and pixels."""


@dataclass(frozen=True)
class Shown:
    """An item and what transformers makes of it, float32 [tokens, width of an arena row]."""

    grid: tuple[int, int, int]
    slots: int
    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    want: torch.Tensor


def backend_of(device: str, vocab: int) -> Any:
    """A backend in float32."""
    if device == "hpu":
        from trencadis.backends.hpu.backend import HpuBackend
        from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
        from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
        from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
        from trencadis.backends.hpu.hpu_settings import HpuSettings
        from trencadis.backends.hpu.shape_policy import policy

        cfg = BackendConfig(dtype=torch.float32, block_size=16, vocab_size=vocab)
        return HpuBackend(
            cfg, policy(""), make_bridge(EmulatedDevice(profile("")), True), HpuSettings(fp32_softmax_vision=True)
        )
    if device == "twin":
        from trencadis.backends.cuda import make_backend as make_cuda

        return make_cuda(
            BackendConfig(dtype=torch.float32, block_size=16, vocab_size=vocab, options={"policy": "twin"})
        )
    from trencadis.backends.cpu import make_backend

    options = {"policy": "padded" if device == "padded" else "serving", "threads": "1"}
    return make_backend(BackendConfig(dtype=torch.float32, block_size=16, vocab_size=vocab, options=options))


class FamilyHarness:
    """One model on one device; ``largest``: slots of the largest launch, ``places``: bound of padding's positions."""

    def __init__(self, path: Path, device: str, largest: int, places: int = 64) -> None:
        config = load_config(path)
        assert config.vision is not None
        self.cell, self.rows = config.vision.slot.cell, largest // config.vision.slot.cell
        self.wide = config.row_parts * arena_width(config, 1)
        self.reserved, self.places = reserved_rows(config), places
        self.backend = backend_of(device, config.text.vocab)
        self.model: Any = load_model(config, self.backend)
        self.model.bind(
            allocate_persistent(
                config, self.backend, blocks=2, block_size=16, arena_rows=self.rows + self.reserved, seqs=1, tokens=16
            )
        )
        listed = tuple(Bucket(Stage.VISION, (s,)) for s in vision_boundaries(largest)) if device == "hpu" else ()
        self.plan = Plan(self.backend.policy, buckets=listed)
        self.program = cache(self._program)

    def _program(self, slots: int) -> Any:
        return self.backend.program(Bucket(Stage.VISION, (slots,)), self.model.vision)

    def worst(self, shown: Sequence[Shown], rng: np.random.Generator, spare: int = 0) -> float:
        """Largest error of one launch over its items, each relative to its oracle's largest value.

        Every slot that holds nothing gets random bytes and small positions; rows of the arena are handed out at random,
        and those that no item owns must keep their content.
        """
        given = [(len(one.want), one.grid, one.slots, one.pixels) for one in shown]
        items, got = self.encoded(given, rng, spare)
        pairs = zip(items, shown, strict=True)
        return max(float((got[i.rows.tolist()] - s.want).abs().max() / s.want.abs().max()) for i, s in pairs)

    def encoded(
        self, given: Sequence[Given], rng: np.random.Generator, spare: int
    ) -> tuple[list[Encode], torch.Tensor]:
        """One launch over items: what was encoded, and the arena behind it."""
        items, row = [], self.reserved + rng.permutation(self.rows)
        for i, (count, grid, slots, pixels) in enumerate(given):
            mine, row = row[:count], row[count:]
            items.append(Encode(str(i), grid, slots, pixels, mine.astype(np.int32)))
        bucket = self.plan.fit(Stage.VISION, (sum(i.slots for i in items) + spare,))
        inputs = self.model.pack(items, bucket.dims[0])
        unused = np.arange(len(inputs.pixels)) % 64 >= np.repeat(inputs.count, 64)
        unused[sum(i.slots for i in items) :] = True
        inputs.pixels[unused] = rng.integers(0, 256, (int(unused.sum()), inputs.pixels.shape[1]), dtype=np.uint8)
        inputs.position[unused] = rng.integers(0, self.places, (int(unused.sum()), 2))
        if inputs.position_rows is not None and inputs.position_weights is not None:
            shape = int(unused.sum()), inputs.position_rows.shape[1]
            inputs.position_rows[unused], inputs.position_weights[unused] = rng.integers(0, 4, shape), rng.random(shape)
        held = self.model.persistent.arena
        arena = torch.full(tuple(held.shape), 7.0).view(-1, self.wide)
        arena[0], arena[1] = 0, float("nan")
        held.copy_(arena.view(held.shape))
        self.model.bind(self.model.persistent)  # constant rows
        program = self.program(bucket.dims[0])
        self.backend.fill(program, inputs)
        program.run()
        self.backend.synchronize()
        got = held.cpu().view(-1, self.wide)
        assert (got[row[:500]] == 7).all() and not got[0].any(), "a row that no item owns was written"
        return items, got


Show = Callable[[int, int, np.random.Generator], Shown]
"""A drawn image of h x w patches and its rows in transformers."""


def worst_packing(harness: FamilyHarness, show: Show, count: int, seed: int, most: int) -> float:
    """The largest error over packings of 1 to 8 images of any size, half of them with spare windows."""
    rng, worst = np.random.default_rng(seed), 0.0
    for _ in range(count):
        sides = 2 * rng.integers(1, most // 2 + 1, (int(rng.integers(1, 9)), 2))
        spare = 64 * int(rng.integers(0, 8)) * int(rng.integers(0, 2))
        worst = max(worst, harness.worst([show(int(h), int(w), rng) for h, w in sides], rng, spare))
    return worst


def worst_of_many(harness: FamilyHarness, show: Show, path: Path, few: bool) -> float:
    """The largest error over 200 images, sized as the processor sizes them, and 100 packings; ``few``: 30 of each."""
    rng, worst, made = np.random.default_rng(3), 0.0, image_processor(load_config(path), {})
    for _ in range(30 if few else 200):
        image = make_image(rng, high=3000)
        grid = made.compute_geometry(image.height, image.width).grid
        worst = max(worst, harness.worst([show(grid[1], grid[2], rng)], rng))
    return max(worst, worst_packing(harness, show, 30 if few else 100, 4, 48))
