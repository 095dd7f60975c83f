"""The test harness: a real model with a small engine's tensors, for launches of any bucket with poisoned padding.

Poison is NaN in SINK (KV block, arena row, hidden row of padding), junk in slot 0, and random legal values in every
padded position. Launches leave room for padding in each axis if their bucket allows it.

Inputs of VISION launches for the checks: items that leave padding in every window, or whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.conformance.check_result import CheckFailed
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, ahead_variant, drafts_ahead, verified_width
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ModelConfig, reserved_rows
from trencadis.core.device.backend import (
    Backend,
    Body,
    HeadTensors,
    PoolTensors,
    Program,
    ResetTensors,
    TextTensors,
    VisionTensors,
)
from trencadis.core.graphs.graph_manager import body_of
from trencadis.core.kv_cache_format import SINK_BLOCK
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent, by_block
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.models import model_loader
from trencadis.core.models.model_and_ops_api import Model, Persistent
from trencadis.core.request import MAX_BIAS
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import PENDING, Bias, Encode, ImageRows, Reset, Row, Sample
from trencadis.core.step_output import HeadOutput, PoolOutput
from trencadis.core.vision_config import NO_SLOT, WINDOW_SLOTS, SlotForm

IMAGE_SLOTS = 1024
"""Slots of the largest launch, unless three tiles need more."""

IMAGE_SIZE = (224, 168)
"""Height and width of an image whose tiles are packed."""

LONGEST_ITEM = 7
"""Maximum windows of an item that is not a tile."""


def most_slots(tile: int) -> int:
    """Returns the slots of the largest VISION launch."""
    return max(IMAGE_SLOTS, 3 * tile)


def tile_of(config: ModelConfig) -> int:
    """Returns the slots of a tile, for models whose images are tiles; 0: launches have any number of windows."""
    return 0 if config.vision is None else model_registry.image_needs(config, {}).tile


def make_inputs(model: Model, config: ModelConfig, slots: int, rng: np.random.Generator) -> tuple[VisionInputs, int]:
    """Returns items that leave padding, and how many windows they use; for models of tiles, ``model.pack`` packs
    whole tiles.
    """
    tile = tile_of(config)
    assert config.vision is not None
    if not tile:
        return _pack_items(slots, config.vision.slot, rng), _used_windows(slots)
    item, items = model_registry.image_sizes(config, {})(*IMAGE_SIZE).item, []
    for i in range(max(slots // tile - 1, 1)):
        pixels = rng.integers(0, 256, (item.patches, config.vision.slot.values), dtype=np.uint8)
        first = reserved_rows(config) + i * item.tokens
        rows = np.arange(first, first + item.tokens, dtype=np.int32)
        items.append(Encode(str(i), item.grid, item.slots, pixels, rows))
    return model.pack(items, slots), len(items) * tile // WINDOW_SLOTS


def _used_windows(slots: int) -> int:
    """Returns how many windows contain an image."""
    return max(slots // WINDOW_SLOTS - 1, 1)


def _pack_items(slots: int, slot: SlotForm, rng: np.random.Generator) -> VisionInputs:
    """Returns items that fill all windows but one; no window that ends an item is full."""
    used, count, row = _used_windows(slots), slots // WINDOW_SLOTS, SINK_ROW + 1
    made = VisionInputs(
        pixels=np.zeros((slots, slot.values), np.uint8),
        position=np.zeros((slots, 2), np.int32),
        segment=np.arange(count, dtype=np.int32) // LONGEST_ITEM,
        count=np.full(count, WINDOW_SLOTS, np.int32),
        rows=np.full(slot.cells(slots), SINK_ROW, np.int32),
    )
    if slot.position_neighbours:
        made.position_rows = np.zeros((slots, slot.position_neighbours), np.int32)
        made.position_weights = np.zeros((slots, slot.position_neighbours), np.float32)
    made.segment[used:] = made.segment[used - 1] + 1 + np.arange(count - used)
    cells = WINDOW_SLOTS // slot.cell
    for window in range(used):
        last = window + 1 == used or (window + 1) % LONGEST_ITEM == 0
        real = max(cells * 9 // 16, 1) if last else cells - cells // 4
        start = window * WINDOW_SLOTS
        here = slice(start, start + real * slot.cell)
        made.pixels[here] = rng.integers(0, 256, (real * slot.cell, slot.values))
        made.position[here] = rng.integers(0, 30, (real * slot.cell, 2))
        if made.position_rows is not None and made.position_weights is not None:
            made.position_rows[here] = rng.integers(0, 4, (real * slot.cell, slot.position_neighbours))
            made.position_weights[here] = rng.random((real * slot.cell, slot.position_neighbours))
        made.count[window] = real * slot.cell
        made.rows[slot.cells(start) : slot.cells(start) + real] = np.arange(row, row + real)
        row += real
    return made


Array = NDArray[Any]
BLOCKS, SEQS, ARENA, TOKENS = 80, 4, 300, 400
STEP_TOKENS = 256
DRAFTS = 3
"""Drafts of a row on devices with a stage for them."""


def edit(tensor: Tensor, change: Callable[[Array], None]) -> None:
    """Changes a tensor of any device, shape and dtype in place; ``change`` gets it as a numpy array."""
    values = tensor.cpu().numpy().copy()
    change(values)
    tensor.copy_(torch.from_numpy(values))


def plan_of(backend: Backend, config: ModelConfig, block: int) -> Plan:
    """Returns the plan of a small engine; for a device without buckets, a plan that rounds needs."""
    tile, most = tile_of(config), most_slots(tile_of(config))
    limits = ShapeLimits(
        SEQS, STEP_TOKENS, 16 * block, block, image_slots=tile or (IMAGE_SLOTS if config.vision else 0),
        least_slots=tile or WINDOW_SLOTS, image_tile=tile, encoder_slots=most,
        drafts=DRAFTS if backend.policy.drafts and backend.policy.rules else 0,
    )  # fmt: skip
    return make_plan(backend.policy, limits, BucketOptions(), config, every=True)


def all_buckets(plan: Plan, stage: Stage, tile: int = 0) -> list[Bucket]:
    """Returns every bucket of ``stage`` that a need within the limits can get; a plan without lists rounds by
    alignment.

    ``tile``: from ``tile_of``.
    """
    if plan.buckets:
        return list(plan.of(stage))
    rows = range(1, 2 * SEQS + 1)
    needs: dict[Stage, list[tuple[int, ...]]] = {
        Stage.PREFILL: [(tokens, r) for tokens in range(1, 130, 9) for r in rows if r <= tokens],
        Stage.VISION: [(slots,) for slots in range(tile or WINDOW_SLOTS, most_slots(tile) + 1, tile or WINDOW_SLOTS)],
    }
    variants = ("greedy", "full") if stage is Stage.SAMPLE else ("",)
    return sorted({plan.fit(stage, need, v) for need in needs.get(stage, [(r,) for r in rows]) for v in variants})


def spread_buckets(buckets: list[Bucket], count: int) -> list[Bucket]:
    """Returns ``count`` buckets of each variant, evenly spaced over the list, including both ends."""
    found: list[Bucket] = []
    for variant in sorted({b.variant for b in buckets}):
        of = [b for b in buckets if b.variant == variant]
        indices = np.unique(np.linspace(0, len(of) - 1, min(count, len(of))).round().astype(int))
        found += [of[i] for i in indices]
    return found


@dataclass
class Harness:
    """A backend with its own model and the tensors of a small engine."""

    config: ModelConfig
    backend: Backend
    block: int
    model: Model = field(init=False)
    persistent: Persistent = field(init=False)
    _values: dict[bool, list[tuple[Tensor, Tensor]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.vocab, self.tile, self.used = self.config.text.vocab, tile_of(self.config), 0
        self.plan = plan_of(self.backend, self.config, self.block)
        self.model = model_loader.load_model(self.config, self.backend)
        self.persistent = allocate_persistent(
            self.config, self.backend, blocks=BLOCKS, block_size=self.block,
            arena_rows=max(ARENA, most_slots(self.tile) // self.slot.cell + 2), seqs=2 * SEQS, tokens=TOKENS,
        )  # fmt: skip
        self.model.bind(self.persistent)
        self.bodies: dict[str, Body] = {
            "text": self.model.text, "greedy": lambda t: self.model.head(t, False),
            "full": lambda t: self.model.head(t, True), "draw": lambda t: self.model.drawn_head(t),
            "penalised": lambda t: self.model.penalised_head(t),
            ahead_variant(DRAFTS): lambda t: self.model.head(t, True),
            "vision": self.model.vision, "reset": self.model.reset, "pool": self.model.pool,
        }  # fmt: skip

    @property
    def slot(self) -> SlotForm:
        """The form of a slot of VISION launches."""
        return self.config.vision.slot if self.config.vision is not None else NO_SLOT

    @property
    def stages(self) -> list[Stage]:
        """The stages that both the device and the model have."""
        policy = self.backend.policy
        offered = [s for s in policy.axes if s in policy.alignment]
        return [s for s in offered if s is not Stage.VISION or self.config.vision is not None]

    def body(self, bucket: Bucket) -> Body:
        """Returns the function that programs of this bucket run."""
        return self.bodies[body_of(bucket)]

    # Persistent tensors

    def prepare(self, poison: bool) -> None:
        """Resets the persistent tensors to fixed values; ``poison`` changes only what padding may touch."""
        if poison not in self._values:
            self._values[poison] = list(self._make_values(poison))
        for tensor, values in self._values[poison]:
            tensor.copy_(values)

    def _make_values(self, poison: bool) -> Iterator[tuple[Tensor, Tensor]]:
        p, rng, parts = self.persistent, np.random.default_rng(5), self.config.row_parts
        spoiled = np.random.default_rng(6)
        bad = np.nan if poison else 0.0
        flat = [cache for kv in p.kv for cache in kv[:2]]  # the whole tensors: views are not written between launches
        areas: tuple[tuple[Tensor, Sequence[int], int | slice | None, int | slice], ...] = (
            *((t, by_block(t, self.block).shape, 0, SINK_BLOCK) for t in flat),
            (p.arena, p.arena.shape, slice(parts), slice(SINK_ROW * parts, (SINK_ROW + 1) * parts)),
            (p.hidden, p.hidden.shape, None, 0),
            *((t, t.shape, None, 0) for t in self._states()),
        )
        for tensor, shape, zero, sink in areas:
            values = rng.standard_normal(tuple(shape), np.float32)
            if zero is not None:
                values[zero] = 0
            values[sink] = bad
            yield tensor, torch.from_numpy(values).to(tensor.dtype).view(tensor.shape)
        highs = {"last": self.vocab, "counts": 3, "prompt_mask": 256, "bias_id": self.vocab, "bias_value": 3}
        for name, high in highs.items():
            tensor = getattr(p.state, name)
            dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            values = rng.integers(0, high, tuple(tensor.shape)).astype(dtype)
            if poison:
                values[0] = spoiled.integers(0, high, values[0].shape)
            yield tensor, torch.from_numpy(values)

    def snapshot(self, bucket: Bucket) -> list[Tensor]:
        """Returns copies of all tensors that a launch may change, without the parts that padding may touch."""
        p = self.persistent
        if bucket.stage is Stage.VISION:
            return [p.arena.cpu()[2 * self.config.row_parts :].clone()]
        if bucket.stage in (Stage.SAMPLE, Stage.RESET, Stage.POOL):
            return [t.cpu()[1:].clone() for t in p.state]
        states = (t.cpu()[1:].clone() for t in self._states())
        return [p.hidden.cpu()[1:].clone(), *(cache.cpu()[2:].clone() for cache in self._caches()), *states]

    def zero_is_zero(self) -> bool:
        """Returns True if ZERO, which padding reads and no launch may write, is still zero."""
        p = self.persistent
        return not p.arena.cpu()[: self.config.row_parts].any() and not any(
            cache.cpu()[0].any() for cache in self._caches()
        )

    def _caches(self) -> list[Tensor]:
        """Returns keys and values of every layer, by block."""
        return [by_block(cache, self.block) for kv in self.persistent.kv for cache in kv[:2]]

    def _states(self) -> list[Tensor]:
        """Returns the recurrent states of every layer, by slot."""
        return [t for layer in self.persistent.recurrent for t in layer if t is not None]

    # One bucket

    def launch(self, program: Program, step: str, real: int, poison: bool = False) -> list[Tensor]:
        """Calls ``run`` or ``replay`` of a filled program on fixed tensors; returns its results and a snapshot."""
        self.prepare(poison)
        out = getattr(program, step)()
        found = [] if out is None else _arrays(self.backend.fetch(out, real).result())
        left = [*found, *self.snapshot(program.bucket)]
        if not self.zero_is_zero():
            raise CheckFailed(f"{program.bucket}: ZERO (KV block 0 or arena row 0) was written")
        return left

    def junk(self, program: Program, inputs: Any) -> bool:
        """Writes random legal values to every padded position; False if the program does not expose ``inputs``."""
        held = getattr(program, "inputs", None)
        change = next((JUNK[c.__name__] for c in type(held).__mro__ if c.__name__ in JUNK), None)
        if change is not None:
            change(self, held, inputs, np.random.default_rng(8))
        return change is not None

    def inputs(self, bucket: Bucket, rng: np.random.Generator) -> tuple[Any, int]:
        """Returns inputs for a launch of ``bucket``, and their number of rows."""
        if bucket.stage is Stage.VISION:
            made, self.used = make_inputs(self.model, self.config, bucket.dims[0], rng)
            return made, 0
        real = max(bucket.dims[0] - 1, 1)
        if bucket.stage is Stage.SAMPLE:
            logprobs, chained = 1 if bucket.variant == "full" else -1, drafts_ahead(bucket) > 0
            drawn = Sample(0.8, 5, 0.9, 0.01, 0.3, 0.1, 1.2, 0.3, (), logprobs)
            sample = Sample() if bucket.variant == "greedy" else drawn
            first = int(rng.integers(1, 60))
            rows_of = [host.SampleRow(first + i, 1 + i, sample) for i in range(real)]
            if chained:  # every other row follows a draft of the one before
                rows_of = [host.SampleRow(first + i, 1 + i // 2, sample, (5, 7)[: i % 2]) for i in range(real)]
            return host.head_inputs(rows_of, self.vocab), real
        if bucket.stage is Stage.POOL:
            first, groups = int(rng.integers(1, 60)), (real + 1) // 2
            return host.pool_inputs([first + i for i in range(real)], [1 + i % groups for i in range(real)]), groups
        if bucket.stage is Stage.RESET:
            one = int(rng.integers(8, 200))
            resets = [Reset(1 + i, (3, 5, i), (7, 7, one), (Bias(4, 1.5),)) for i in range(real)]
            return host.reset_inputs(resets, self.vocab), real
        rows = _rows(bucket, rng, self.vocab, self.block)
        return host.text_inputs(rows), len(rows)


def _arrays(head: HeadOutput | PoolOutput) -> list[Tensor]:
    """Returns copies of the head's arrays, since the next launch may overwrite a fetched one."""
    if isinstance(head, PoolOutput):
        return [torch.from_numpy(np.array(head.values))]
    values = (head.token, head.logprob, head.rank, head.top_id, head.top_logprob)
    return [torch.from_numpy(np.array(v)) for v in values if v is not None]


def _rows(bucket: Bucket, rng: np.random.Generator, vocab: int, size: int) -> list[Row]:
    """Returns as many rows and tokens as fit, with room for padding in every axis if possible."""
    free = iter(2 + rng.permutation(BLOCKS))

    def row(slot: int, context: int, count: int) -> Row:
        blocks = tuple(int(next(free)) for _ in range(-(-(context + count) // size)))
        tokens = [int(t) for t in rng.integers(0, vocab, count)]
        images: tuple[ImageRows, ...] = ()
        if count > 4:
            images = (ImageRows(1, np.arange(2 + 2 * slot, 4 + 2 * slot, dtype=np.int32)),)
        elif slot == 1:
            tokens[-1] = PENDING
        positions = rng.integers(0, 90, (3, count)).astype(np.int32)
        return Row(slot, slot, context, tuple(tokens), blocks, positions, images)

    first, second = (*bucket.dims, 0)[:2]
    if bucket.stage is Stage.PREFILL:
        return _make_ragged_rows(row, tokens=max(first - 3, 1), rows=max(second - 1, 1))
    if bucket.stage is Stage.CONTEXT:
        return [row(1, max((second - 1) * size - 3, 1) if second > 1 else 5, max(first - 3, 1))]
    rows = max(first - 1, 1)
    if bucket.stage is Stage.FRESH:
        return [row(i + 1, 0, max(second - 1 - i, 1)) for i in range(rows)]
    each = max(second // rows, 1)
    if bucket.stage is Stage.VERIFY:
        width = verified_width(bucket)
        counts = [1 + i % width for i in range(rows)] if rows > 1 else [width]
        return [row(i + 1, max(each * size - n - 3 - i, 0), n) for i, n in enumerate(counts)]
    return [row(i + 1, (each - 1) * size + 3 + i, 1) for i in range(rows)]


def _make_ragged_rows(row: Callable[[int, int, int], Row], tokens: int, rows: int) -> list[Row]:
    """Returns chunks of several tokens first, with and without context, then single tokens."""
    rows = min(rows, tokens)
    long = tokens - rows + 1
    return [row(1, 0 if rows % 2 else 21, long), *(row(1 + i, 9 * i, 1) for i in range(1, rows))]


# Junk in padded positions


def _junk_text(harness: Harness, x: TextTensors, inputs: StepInputs, rng: np.random.Generator) -> None:
    pad = x.out_row.cpu().numpy() == 0

    def scatter(tensor: Tensor, low: int, high: int) -> None:
        padded = np.ones(tensor.shape[-1], bool)  # the start of a launch may be padded to more than its rows
        padded[: len(pad)] = pad

        def change(values: Array) -> None:
            values[..., padded] = rng.integers(low, high, values[..., padded].shape)

        edit(tensor, change)

    scatter(x.tokens, 0, harness.vocab)
    scatter(x.positions, 0, 90)
    scatter(x.image_row, 2, ARENA)
    scatter(x.from_slot, 1, SEQS)
    attn: Any = x.attn  # of the device's own class
    if hasattr(attn, "slot_map"):
        if attn.blocks.dim() == 2:
            edit(attn.blocks, lambda v: _junk_table(v, inputs, rng, harness.block))
        return
    if hasattr(attn, "slot"):
        scatter(attn.slot, SINK_BLOCK * harness.block, (SINK_BLOCK + 1) * harness.block)
    if hasattr(attn, "block_list"):
        listed = attn.block_list.cpu().numpy() == 0
        edit(attn.block_list, lambda v: _put(v, listed, rng.integers(2, BLOCKS, int(listed.sum()))))
        if hasattr(attn, "usage"):
            shape = (int(listed.sum()), *attn.usage.shape[1:])
            edit(attn.usage, lambda v: _put(v, listed, rng.integers(1, harness.block + 1, shape)))


def _put(values: Array, where: slice | NDArray[np.bool_], what: Array) -> None:
    values[where] = what


def _junk_table(blocks: Array, inputs: StepInputs, rng: np.random.Generator, size: int) -> None:
    """Writes junk to block table entries beyond a row's tokens, and to those of missing rows."""
    counts = np.diff(inputs.row_start)
    for row in range(len(blocks) - 1):
        used = -(-int(inputs.context[row] + counts[row]) // size) if row < len(counts) else 0
        blocks[row, used:] = rng.integers(2, BLOCKS, blocks.shape[1] - used)


def _junk_vision(harness: Harness, x: VisionTensors, inputs: VisionInputs, rng: np.random.Generator) -> None:
    slots = x.pixels.shape[0]
    windows = slots // WINDOW_SLOTS
    used = np.arange(windows) < harness.used
    real = np.where(used, inputs.count, 0)
    pad = (np.arange(slots) % WINDOW_SLOTS) >= np.repeat(real, WINDOW_SLOTS)
    edit(x.pixels, lambda v: _put(v, pad, rng.integers(0, 256, (int(pad.sum()), x.pixels.shape[1]))))
    edit(x.position, lambda v: _put(v, pad, rng.integers(0, inputs.position.max() + 1, (int(pad.sum()), 2))))
    if x.position_rows is not None and x.position_weights is not None:
        shape = int(pad.sum()), x.position_rows.shape[1]
        edit(x.position_rows, lambda v: _put(v, pad, rng.integers(0, 4, shape)))
        edit(x.position_weights, lambda v: _put(v, pad, rng.random(shape)))
    edit(x.segments.real, lambda v: _put(v, ~used, rng.integers(1, WINDOW_SLOTS + 1, int((~used).sum()))))


def _junk_head(harness: Harness, x: HeadTensors, inputs: HeadInputs, rng: np.random.Generator) -> None:
    rest = slice(len(inputs.slot), None)
    size = x.slot.shape[0] - len(inputs.slot)
    masks = x.masks.shape[0]
    whole = {"hidden_row": TOKENS, "top_k": 9, "target": harness.vocab, "mask_row": masks}
    for name, high in whole.items():
        junk = rng.integers(0, high, size)
        edit(getattr(x, name), partial(_put, where=rest, what=junk))
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "uniform"):
        edit(getattr(x, name), lambda v: _put(v, rest, rng.uniform(0.01, 1, size)))
    unused = slice(len(inputs.masks), None)
    edit(x.masks, lambda v: _put(v, unused, 1 | rng.integers(0, 256, (masks - len(inputs.masks), v.shape[1]))))


def _junk_reset(harness: Harness, x: ResetTensors, inputs: ResetInputs, rng: np.random.Generator) -> None:
    rest, size = slice(len(inputs.slot), None), x.slot.shape[0] - len(inputs.slot)
    edit(x.counts, lambda v: _put(v, rest, rng.integers(0, 9, (size, harness.vocab))))
    edit(x.prompt_mask, lambda v: _put(v, rest, rng.integers(0, 256, (size, v.shape[1]))))
    edit(x.bias_id, lambda v: _put(v, rest, rng.integers(0, harness.vocab, (size, MAX_BIAS))))
    edit(x.bias_value, lambda v: _put(v, rest, rng.uniform(-9, 9, (size, MAX_BIAS))))


def _junk_pool(harness: Harness, x: PoolTensors, inputs: PoolInputs, rng: np.random.Generator) -> None:
    rest, size = slice(len(inputs.group), None), x.group.shape[0] - len(inputs.group)
    edit(x.hidden_row, lambda v: _put(v, rest, rng.integers(0, TOKENS, size)))


JUNK: dict[str, Callable[..., None]] = {
    "TextTensors": _junk_text, "VisionTensors": _junk_vision, "HeadTensors": _junk_head, "ResetTensors": _junk_reset,
    "PoolTensors": _junk_pool,
}  # fmt: skip
