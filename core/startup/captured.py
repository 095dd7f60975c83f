"""Start-up of a device that captures graphs: weights, plan, arena, profile, usable, KV, compile, capture, validate.

A model that cannot fit is refused before its weights are loaded, by config.json alone. Each phase is charged with the
free memory that it used up, so that the ledger's rows sum to the device.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from trencadis.core.backend import Backend
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graphs.agree import Agreement
from trencadis.core.graphs.capture import Captures
from trencadis.core.graphs.journal import Journal
from trencadis.core.graphs.observer import GraphObserver
from trencadis.core.graphs.profile import PROFILE_BLOCKS, profile
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.graphs.watch import GraphWatch
from trencadis.core.launches.host_blocks import PlannedCopies
from trencadis.core.launches.persistent import hidden_rows, image_arena, kv_cache, sampler_state, stream_rows
from trencadis.core.launches.pipe import LAST
from trencadis.core.launches.runner import Runner
from trencadis.core.layout import RESERVED_BLOCKS
from trencadis.core.memory import measured
from trencadis.core.memory.asked_kv import kv_asked
from trencadis.core.memory.estimate import costliest
from trencadis.core.memory.host_plan import CachePlan
from trencadis.core.memory.ledger import Before, Division, check_room, divide
from trencadis.core.memory.meter import Meter
from trencadis.core.memory.units import gib
from trencadis.core.models import registry
from trencadis.core.models.interface import HostLayering, Model, Persistent
from trencadis.core.progress import Progress, Throttle
from trencadis.core.shapes import options as bucket_env
from trencadis.core.shapes.closure import ShapeLimits
from trencadis.core.shapes.seen import planned_units
from trencadis.core.startup.dry_run import DryRun, Planned, PlannedDevice
from trencadis.core.startup.host_tier import planned_copies, with_host_blocks
from trencadis.core.startup.stages import planned_stage

SAID = ("max_model_len", "graphs:", "host memory: weights", "weights:", "KV cache:", "--kv-cache-dtype")
"""How notes of the paper plan begin that users must know."""


@dataclass(frozen=True)
class Fixed:
    """Everything of fixed size: the runner with all programs' inputs, the tensors, and what profiled launches held."""

    runner: Runner
    tensors: Persistent
    activations: Mapping[Bucket, int]
    copies: PlannedCopies | None = None


class Divided(NamedTuple):
    """How the free memory is divided, and the limits, whose model length may be lowered to what fits."""

    limits: ShapeLimits
    division: Division


class StartedDevice(NamedTuple):
    """A device that is ready to run Steps; ``captures`` has its ledger and what its graphs cost."""

    runner: Runner
    cache: CachePlan
    limits: ShapeLimits
    watch: GraphWatch
    captures: Captures


@dataclass(frozen=True)
class DeviceStart:
    """One start-up: what is known before weights are loaded, and the phases that follow, each of which returns a value.

    ``key``: what its measurements are stored under.
    """

    config: EngineConfig
    model_config: ModelConfig
    backend: Backend
    progress: Progress
    key: measured.Key
    paper: Planned

    @classmethod
    def planned(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        backend: Backend,
        progress: Progress,
        images: ImageNeeds | None = None,
    ) -> DeviceStart:
        """Plans a start-up; nothing is allocated yet.

        Args:
            images: what images may need; None: as the checkpoint's processor says.

        Raises:
            StartupError: the model cannot fit, or ranks planned different shapes.
        """
        images = images or registry.image_needs(model_config, config.mm_processor_kwargs, config.image_alignment)
        key = _key(config, model_config, backend)
        return cls(config, model_config, backend, progress, key, _paper(config, model_config, backend, images, key))

    def run(self) -> StartedDevice:
        """Runs all phases, and warm-up as configured.

        Objects that exist already are frozen, because each phase collects its garbage before it is measured.
        """
        gc.collect()
        gc.freeze()
        try:
            return self._run()
        finally:
            gc.unfreeze()

    def _run(self) -> StartedDevice:
        meter = Meter(self.backend)
        self.progress("weights", gib(self.paper.sized.weights()), 0.1)
        if self.config.cpu_offload_gb:
            cast(HostLayering, self.backend).host_layers.make()
            meter.book("copies")
        model = registry.build(self.model_config, self.backend, self.config)
        meter.book("weights")
        self.progress("profiling", f"{len(self.paper.plan.buckets)} planned shapes", 0.6)
        fixed = self._fixed(model, meter)
        limits, division = self._divide(meter.before())
        cache = self._kv(model, fixed.tensors, meter, limits, division)
        cache = with_host_blocks(self.config, fixed.runner, fixed.tensors, cache, fixed.copies, not self._eager)
        meter.book("copies")
        captures = self._captures(fixed, meter.before(), limits, division)
        return StartedDevice(fixed.runner, cache, limits, self._warm(fixed.runner, captures), captures)

    def _fixed(self, model: Model, meter: Meter) -> Fixed:
        """Makes the tensors of fixed size and all programs' inputs, and profiles on a KV cache of three blocks."""
        c, b, limits, plan = self.model_config, self.backend, self.paper.limits, self.paper.plan
        arena = image_arena(c, b, self.paper.arena_rows)
        meter.book("arena")
        state = sampler_state(c, b, limits.max_rows)
        meter.book("state")
        most = max(limits.max_tokens, limits.max_rows)
        hidden, stream = hidden_rows(c, b, most), stream_rows(c, b, most)
        meter.book("hidden")
        small = kv_cache(c, b, PROFILE_BLOCKS - RESERVED_BLOCKS, limits.block_size)
        meter.book("profile")
        tensors = Persistent(small, hidden, arena, state, stream)
        model.bind(tensors)
        runner = Runner(b, model, plan, GraphObserver(self.progress.enter, lazy=self.config.warmup == "skip"))
        runner.pass_by(tensors)
        for bucket in sorted(plan.buckets, key=lambda b: (-math.prod(b.dims), -planned_units(b.variant), b.variant)):
            runner.graphs.program(bucket)  # largest first, so that programs that share inputs allocate them once
        meter.book("inputs")
        copies = planned_copies(self.config, b, small)
        meter.book("copies")
        activations = self.paper.sized.activations
        held = profile(runner.graphs, costliest(plan, lambda bucket: activations(bucket, limits.block_size)))
        if copies is not None:
            copies.rehearse(small)
        meter.book("activations")
        return Fixed(runner, tensors, held, copies)

    @property
    def _eager(self) -> bool:
        """Whether nothing is captured."""
        return self.paper.settings.eager

    def _divide(self, own: Before) -> Divided:
        """Divides the free memory of the fullest rank into KV cache and graph pools.

        The KV cache must hold one request of max_model_len.
        """
        agreement = Agreement(self.backend)
        total, free = agreement.least(own.total, own.free)
        before = dataclasses.replace(own, total=total, others=own.others + total - free - own.taken)
        before = dataclasses.replace(before, copies=max(own.copies, self.paper.ledger.before.copies))
        config, limits, settings = self.config, self.paper.limits, self.paper.settings
        block = self.paper.sized.block_bytes(limits.block_size)
        of, multimodal = self.backend.policy.utilisation_of, self.model_config.sees
        args = (before, config.gpu_memory_utilization, of, settings, block, multimodal)
        division = divide(*args)
        fits = agreement.over_stages(division.blocks)[0] * limits.block_size
        if config.max_model_len is None and 0 < fits < limits.max_model_len:
            limits = dataclasses.replace(limits, max_model_len=fits)
        else:
            division = check_room(*args, needed=limits.row_blocks, max_model_len=limits.max_model_len)
        asked = kv_asked(config, block)
        division = division if asked is None else divide(*args, kv_bytes=asked)
        (count,) = agreement.over_stages(division.blocks)
        if count < division.blocks:
            division = divide(*args, kv_bytes=(count + RESERVED_BLOCKS) * block)
        return Divided(limits, division)

    def _kv(
        self, model: Model, tensors: Persistent, meter: Meter, limits: ShapeLimits, division: Division
    ) -> CachePlan:
        """Makes the KV cache, in place of the small one."""
        block = self.paper.sized.block_bytes(limits.block_size)
        self.progress("caches", f"{division.blocks} blocks, {gib(division.kv)} of KV cache", 0.7)
        tensors.kv = kv_cache(self.model_config, self.backend, -RESERVED_BLOCKS, limits.block_size)
        model.bind(tensors)  # empty tensors: the bodies hold the small cache through the model
        meter.book("profile")
        (held,) = Agreement(self.backend).over_stages(self.backend.kv_blocks(division.blocks + RESERVED_BLOCKS, block))
        held -= RESERVED_BLOCKS
        tensors.kv = kv_cache(self.model_config, self.backend, held, limits.block_size)
        model.bind(tensors)
        meter.book("kv")
        if held < limits.row_blocks:
            raise StartupError(
                f"one request of --max-model-len {limits.max_model_len} needs {limits.row_blocks} KV blocks and "
                f"{held} are held; --max-model-len {held * limits.block_size} fits"
            )
        return CachePlan(
            num_blocks=held,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            arena_rows=self.paper.arena_rows,
            kv_bytes=division.kv,
            arena_bytes=meter.rows["arena"],
            weights_bytes=meter.rows["weights"],
            notes=(*self.backend.notes, *self.paper.plan.notes, *self._said(), *_backed(held, division.blocks)),
        )

    def _said(self) -> list[str]:
        """Notes of the paper plan that users must know, and what a skipped warm-up costs where nothing is captured."""
        found = [n for n in self.paper.notes if n.startswith(SAID)]
        mode, count = self.backend.policy.graphless, len(self.paper.plan.buckets)
        if mode and self.config.warmup == "skip":
            found.append(
                f"warm-up is skipped: in {mode} the first launch of each of {count} shapes waits for the compiler, "
                "seconds or more on a card; a recipe cache of an earlier start saves most of that"
            )
        return found

    def _captures(self, fixed: Fixed, before: Before, limits: ShapeLimits, division: Division) -> Captures:
        block = self.paper.sized.block_bytes(limits.block_size)
        return Captures(
            fixed.runner.graphs,
            before,
            division,
            self.paper.settings,
            self.paper.prices,
            multimodal=self.model_config.sees,
            least_kv=(limits.row_blocks + RESERVED_BLOCKS) * block,
            block_bytes=block,
            journal=Journal(self.config.skip_captures, self.progress.capture, self.model_config.share.stage),
            keep=lambda captures: self._keep(captures, fixed.activations),
        )

    def _warm(self, runner: Runner, captures: Captures) -> GraphWatch:
        """Warms up as configured; with ``skip`` every bucket is prepared at its first use."""
        mode = self.config.warmup
        warmed = getattr(self.backend, "warmed", lambda: None)
        warmup = Warmup(runner.graphs, captures, self.config.strict_warmup, Throttle(self.progress), warmed)
        watch = GraphWatch(runner.graphs, captures, mode, warmup if mode != "skip" else None)
        if mode == "full":
            warmup.full()
        elif mode == "background":
            runner.warm_by(warmup)
        captures.observe()
        if mode != "full":
            captures.keep(captures)
        return watch

    def _keep(self, captures: Captures, profiled: Mapping[Bucket, int]) -> None:
        """Stores measurements for ``--graph-memory auto`` and ``trencadis plan``.

        After a full warm-up, the ledger's activations are final. Without one, other programs may have changed the
        device's free memory since, so that the profile's figures are kept.
        """
        if self.backend.comm.rank:
            return
        full = self.config.warmup == "full"
        settled, most = captures.ledger.before.activations, max(profiled.values(), default=0)
        held = {b: settled if full and count == most else count for b, count in profiled.items()}
        new = measured.Measured(dict(captures.measured), dict(captures.graphs.took), held)
        measured.keep(self.key, new, measured.folder(), complete=full)


def _key(config: EngineConfig, model_config: ModelConfig, backend: Backend) -> measured.Key:
    return measured.Key(
        measured.fingerprint(model_config),
        backend.label,
        f"{8 * backend.dtype.itemsize} bit",
        backend.comm.world,
        config.block_size or backend.policy.block_sizes[0],
    )


def _paper(
    config: EngineConfig, model_config: ModelConfig, backend: Backend, images: ImageNeeds, key: measured.Key
) -> Planned:
    """The dry run on the memory of the fullest rank of this stage; the model length is what all stages hold."""
    agreement, comm, memory = Agreement(backend), backend.comm, backend.memory
    total, free = agreement.least(memory.total(), memory.free())
    device = PlannedDevice(backend.name, total, total - free, comm.world, backend.dtype.itemsize)
    asked, known = bucket_env.read(os.environ), measured.load(key, measured.folder())
    start = DryRun(config, model_config, backend.policy, asked, images, device, known)
    paper = planned_stage(start)
    (length,) = agreement.over_stages(paper.limits.max_model_len)
    if length < paper.limits.max_model_len:
        paper = planned_stage(dataclasses.replace(start, at_most=length))
    mine = zlib.crc32(repr((paper.plan.buckets, paper.limits, paper.settings, paper.arena_rows)).encode())
    text = tuple(b for b in paper.plan.buckets if b.stage not in (Stage.VISION, *LAST))
    common = zlib.crc32(repr((text, paper.limits, paper.arena_rows)).encode())
    least, most = agreement.over_stages(common, -common)
    if len({*agreement.least(mine), *agreement.most(mine)}) > 1 or least != -most:
        raise StartupError("the ranks planned different shapes: a file of buckets or measurements has just changed")
    return paper


def _backed(held: int, booked: int) -> list[str]:
    """The line about an imitated card, whose KV cache is smaller than its ledger says."""
    return [] if held == booked else [f"{booked} KV blocks are booked; the host backs {held} of them."]
