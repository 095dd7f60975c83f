"""A start-up on paper: limits, plan, ledger and graphs of a configuration, from config.json alone. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from trencadis.core import graph_budget as budget
from trencadis.core.bucket_env import BucketsAsked
from trencadis.core.buckets import Bucket, Plan, Policy
from trencadis.core.closure import ShapeLimits
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.estimate import Sized, before
from trencadis.core.graph_budget import Choice, Price
from trencadis.core.ledger import (
    POOLS,
    Before,
    Division,
    GraphSettings,
    Ledger,
    check_room,
    divide,
    pool_of,
    unused_line,
    utilisation_that_fits,
)
from trencadis.core.measured import Measured
from trencadis.core.memory_plan import Asked, arena_rows
from trencadis.core.models.config import ModelConfig
from trencadis.core.planner import make_plan

BUILT_FOR_FEW = 128, 2048
BUILT_FOR_MANY = 256, 8192
"""(max_num_seqs, max_num_batched_tokens) where the user names none: on a CPU, elsewhere."""


@dataclass(frozen=True)
class Images:
    """What pictures may need: slots and tokens of the largest, slots of the smallest; all 0 without a tower."""

    slots: int = 0
    least_slots: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Device:
    """One of ``ranks`` equal devices. ``total`` and ``others`` (used by other programs) in bytes."""

    name: str
    total: int
    others: int = 0
    ranks: int = 1
    itemsize: int = 2


@dataclass(frozen=True)
class Planned:
    """Everything that is known before loading. ``formula``: figures that no measurement backs."""

    plan: Plan
    limits: ShapeLimits
    sized: Sized
    ledger: Ledger
    settings: GraphSettings
    prices: tuple[Price, ...]
    choice: Choice
    seconds: Mapping[Bucket, float]
    formula: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def concurrency(self) -> float:
        """Requests of the full model length that the KV cache holds."""
        return self.ledger.division.blocks * self.limits.block_size / self.limits.max_model_len


def graph_settings(config: EngineConfig) -> GraphSettings:
    """The graph flags as the ledger takes them."""
    return GraphSettings(
        reserved=config.graph_reserved_mem,
        prompt=config.graph_prompt_ratio,
        text=config.graph_multimodal_prompt_ratio,
        prompt_strategy=config.graph_prompt_strategy,
        decode_strategy=config.graph_decode_strategy,
        eager=config.enforce_eager,
    )


def shape_limits(config: EngineConfig, model: ModelConfig, policy: Policy, images: Images) -> ShapeLimits:
    """The limits of a configuration, defaults filled in.

    Raises:
        StartupError: a block size that the device lacks, or a length that the model was not made for.
    """
    block = config.block_size or policy.block_sizes[0]
    if block not in policy.block_sizes:
        known = ", ".join(map(str, policy.block_sizes))
        raise StartupError(f"--block-size {block} is not supported here; use one of {known}.")
    longest = model.text.max_positions
    length = config.max_model_len or longest
    if length > longest:
        raise StartupError(f"--max-model-len {length} is more than the model was made for; the largest is {longest}.")
    seqs, tokens = BUILT_FOR_MANY if policy.captures else BUILT_FOR_FEW
    return ShapeLimits(
        max_rows=config.max_num_seqs or seqs,
        max_tokens=config.max_num_batched_tokens or tokens,
        max_model_len=length,
        block_size=block,
        image_slots=images.slots,
        least_slots=max(images.least_slots, 1),
    )


@dataclass(frozen=True)
class Start:
    """What a start-up is planned from."""

    config: EngineConfig
    model: ModelConfig
    policy: Policy
    asked: BucketsAsked
    images: Images
    device: Device
    measured: Measured | None = None

    @property
    def sized(self) -> Sized:
        """The model on one device."""
        return Sized(self.model, self.device.itemsize, self.device.ranks)

    @property
    def multimodal(self) -> bool:
        """Whether graphs for images share the prompts' pool."""
        return self.model.vision is not None

    def planned(self) -> Planned:
        """The plan and the ledger of one device.

        A model length that the user did not ask for is lowered to what the KV cache holds.

        Raises:
            StartupError: it does not fit; the line names the setting that would.
        """
        limits = shape_limits(self.config, self.model, self.policy, self.images)
        plan = self._plan(limits)
        settings = self._settings(plan)
        ledger, shorter = self._room(plan, limits, settings)
        notes: list[str] = []
        if shorter:
            notes.append(self._lowered(limits, ledger, settings, shorter))
            limits = dataclasses.replace(limits, max_model_len=shorter)
            plan = self._plan(limits)
            ledger, _ = self._room(plan, limits, settings)
        prices = self._prices(plan)
        choice = budget.choose([] if settings.eager else prices, ledger.division, settings, self.policy.pool_cost)
        ledger = dataclasses.replace(ledger, spent=dict(choice.spent))
        lines = (*plan.notes, *notes, *self._advice(ledger, choice, prices, settings))
        return Planned(
            plan,
            limits,
            self.sized,
            ledger,
            settings,
            tuple(prices),
            choice,
            self._seconds(plan),
            self._formula(),
            lines,
        )

    def _plan(self, limits: ShapeLimits) -> Plan:
        return make_plan(self.policy, limits, self.asked, self.model)

    def _settings(self, plan: Plan) -> GraphSettings:
        """The shares, or with ``--graph-memory auto`` what every pool was measured to need and a tenth."""
        settings = graph_settings(self.config)
        if not self.policy.captures:
            return dataclasses.replace(settings, eager=True)
        if self.config.graph_memory != "auto" or self.measured is None or settings.eager:
            return settings
        prices = self._prices(plan)
        by_pool = [[p for p in prices if pool_of(p.bucket.stage) == pool] for pool in POOLS]
        text, vision, decode = (-(-11 * budget.set_cost(found, self.policy.pool_cost) // 10) for found in by_pool)
        return dataclasses.replace(settings, asked=(text, vision, decode))

    def _prices(self, plan: Plan) -> list[Price]:
        """Every planned graph's price: measured or predicted from measurements, else by formula."""
        formulas = [self.sized.price(b) for b in plan.buckets]
        if self.measured is None or not self.measured.graphs:
            return formulas
        known = self.measured.graphs
        return [Price(p.bucket, budget.predict(p.bucket, self.sized.io(p.bucket), p.alone, known)) for p in formulas]

    def _room(self, plan: Plan, limits: ShapeLimits, settings: GraphSettings) -> tuple[Ledger, int]:
        """The ledger without graphs, and the shorter model length that it holds (0: the one of ``limits``)."""
        taken = self._before(plan, limits)
        block = self.sized.block_bytes(limits.block_size)
        args = (taken, self.config.gpu_memory_utilization, self.policy.utilisation_of, settings, block, self.multimodal)
        division = divide(*args)
        fits = division.blocks * limits.block_size
        if self.config.max_model_len is None and 0 < fits < limits.max_model_len:
            return Ledger(taken, division), fits
        division = check_room(*args, needed=limits.row_blocks, max_model_len=limits.max_model_len)
        if self.config.kv_cache_memory_bytes is not None:
            _check_kv(self.config.kv_cache_memory_bytes, division)
            division = divide(*args, kv_bytes=self.config.kv_cache_memory_bytes)
        return Ledger(taken, division), 0

    def _before(self, plan: Plan, limits: ShapeLimits) -> Before:
        seqs = limits.max_rows
        wanted = Asked(
            limits.block_size, seqs, self.config.max_model_len, arena_images=self.config.encoder_cache_images
        )
        rows = arena_rows(self.model, wanted, min(self.images.tokens, limits.max_model_len))
        taken = before(self.sized, plan, limits, self.device.total, self.device.others, rows)
        if self.measured is not None and self.measured.activations:
            return dataclasses.replace(taken, activations=self.measured.activations)
        return taken

    def _lowered(self, limits: ShapeLimits, ledger: Ledger, settings: GraphSettings, length: int) -> str:
        block = self.sized.block_bytes(limits.block_size)
        of = self.policy.utilisation_of
        larger = utilisation_that_fits(ledger.before, of, settings, block, self.multimodal, limits.row_blocks)
        hint = f"; --gpu-memory-utilization {larger:.2f} would hold it" if larger else ""
        return f"max_model_len is lowered from {limits.max_model_len} to {length}, what the KV cache holds{hint}."

    def _advice(self, ledger: Ledger, choice: Choice, prices: list[Price], settings: GraphSettings) -> list[str]:
        """Lines about a graph budget that is too small or too large."""
        if settings.eager:
            return []
        lines: list[str | None] = []
        if choice.missing:
            rule = self.policy.pool_cost
            holds = budget.reserve_that_holds(prices, ledger.division, settings, rule, self.multimodal)
            lines.append(budget.exhausted_line(choice, holds, ledger.division))
        if settings.asked is None:
            block = self.sized.block_bytes(self.config.block_size or self.policy.block_sizes[0])
            lines.append(unused_line(ledger, block, settings.reserved))
        return [line for line in lines if line]

    def _seconds(self, plan: Plan) -> dict[Bucket, float]:
        """Seconds of compiling and capturing each bucket."""
        known = self.measured.seconds if self.measured else {}
        return {b: known.get(b, self.sized.seconds(b)) for b in plan.buckets}

    def _formula(self) -> tuple[str, ...]:
        """Figures that no measurement backs."""
        m = self.measured or Measured()
        known = {"graphs": m.graphs, "warm-up seconds": m.seconds, "activations": m.activations}
        return ("weights", *(name for name, value in known.items() if not value))


def _check_kv(asked: int, division: Division) -> None:
    room = division.usable - division.graphs
    if asked > room:
        raise StartupError(f"--kv-cache-memory-bytes {asked} is more than the {room} bytes that are left for it.")
