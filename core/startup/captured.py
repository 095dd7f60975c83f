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
from dataclasses import dataclass

from trencadis.core.backend import Backend
from trencadis.core.buckets import Bucket
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graphs.agree import Agreement
from trencadis.core.graphs.capture import Captures
from trencadis.core.graphs.journal import Journal
from trencadis.core.graphs.profile import PROFILE_BLOCKS, profile
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.graphs.watch import GraphWatch
from trencadis.core.launches.persistent import hidden_rows, image_arena, kv_cache, sampler_state
from trencadis.core.launches.runner import Runner
from trencadis.core.layout import RESERVED_BLOCKS
from trencadis.core.memory import measured
from trencadis.core.memory.host_plan import CachePlan
from trencadis.core.memory.ledger import Before, Division, check_room, divide
from trencadis.core.memory.meter import Meter
from trencadis.core.memory.profiled import costliest
from trencadis.core.memory.units import gib
from trencadis.core.models import registry
from trencadis.core.models.interface import Model, Persistent
from trencadis.core.progress import Progress, Throttle
from trencadis.core.shapes import options as bucket_env
from trencadis.core.shapes.closure import ShapeLimits
from trencadis.core.startup.dry_run import DryRun, Planned, PlannedDevice, kv_asked


@dataclass
class DeviceStart:
    """One start-up, phase by phase; attributes appear as the phases pass."""

    config: EngineConfig
    model_config: ModelConfig
    backend: Backend
    progress: Progress
    images: ImageNeeds | None = None
    """What images may need; None: as the checkpoint's processor says."""

    def run(self) -> tuple[Runner, CachePlan, ShapeLimits, GraphWatch]:
        """Runs all phases, and warm-up as configured.

        Objects that exist already are frozen, because each phase collects its garbage before it is measured.
        """
        gc.collect()
        gc.freeze()
        try:
            return self._run()
        finally:
            gc.unfreeze()

    def _run(self) -> tuple[Runner, CachePlan, ShapeLimits, GraphWatch]:
        images = self.images or registry.image_needs(
            self.model_config, self.config.mm_processor_kwargs, self.config.image_alignment
        )
        self.meter = Meter(self.backend)
        self.agreement = Agreement(self.backend)
        self.key = self._key()
        self.paper = self._paper(images)
        self.limits, self.sized = self.paper.limits, self.paper.sized
        self.progress("weights", gib(self.sized.weights()), 0.1)
        model = registry.build(self.model_config, self.backend, self.config)
        self.meter.book("weights")
        self.progress("profiling", f"{len(self.paper.plan.buckets)} planned shapes", 0.6)
        runner = self._fixed(model)
        division = self._divide(self.meter.before())
        cache = self._kv(model, division)
        self.captures = self._captures(runner, division)
        watch = self._warm(runner, self.captures)
        return runner, cache, self.limits, watch

    def _key(self) -> measured.Key:
        itemsize = self.backend.dtype.itemsize
        block = self.config.block_size or self.backend.policy.block_sizes[0]
        return measured.Key(
            measured.fingerprint(self.model_config), self.backend.label, f"{8 * itemsize} bit",
            self.backend.comm.world, block,
        )  # fmt: skip

    def _paper(self, images: ImageNeeds) -> Planned:
        """The dry run; raises StartupError if the model cannot fit."""
        comm, memory = self.backend.comm, self.backend.memory
        total, free = self.agreement.least(memory.total(), memory.free())
        device = PlannedDevice(self.backend.name, total, total - free, comm.world, self.backend.dtype.itemsize)
        asked, known = bucket_env.read(os.environ), measured.load(self.key, measured.folder())
        paper = DryRun(self.config, self.model_config, self.backend.policy, asked, images, device, known).planned()
        mine = zlib.crc32(repr((paper.plan.buckets, paper.limits, paper.settings, paper.arena_rows)).encode())
        if len({*self.agreement.least(mine), *self.agreement.most(mine)}) > 1:
            raise StartupError("the ranks planned different shapes: a file of buckets or measurements has just changed")
        return paper

    def _fixed(self, model: Model) -> Runner:
        """Makes the tensors of fixed size and all programs' inputs, and profiles on a KV cache of three blocks."""
        c, b, limits = self.model_config, self.backend, self.limits
        arena = image_arena(c, b, self.paper.arena_rows)
        self.meter.book("arena")
        state = sampler_state(c, b, limits.max_rows)
        self.meter.book("state")
        hidden = hidden_rows(c, b, max(limits.max_tokens, limits.max_rows))
        self.meter.book("hidden")
        small = kv_cache(c, b, PROFILE_BLOCKS - RESERVED_BLOCKS, limits.block_size)
        self.meter.book("profile")
        self.persistent = Persistent(small, hidden, arena, state)
        model.bind(self.persistent)
        runner = Runner(b, model, self.paper.plan)
        runner.graphs.enter = self.progress.enter
        for bucket in sorted(self.paper.plan.buckets, key=lambda b: (-math.prod(b.dims), b.variant)):
            runner.graphs.program(bucket)  # largest first, so that programs that share inputs allocate them once
        self.meter.book("inputs")
        activations = self.sized.activations
        chosen = costliest(runner.plan, lambda bucket: activations(bucket, limits.block_size))
        self.profiled = profile(runner.graphs, chosen)
        self.meter.book("activations")
        return runner

    def _divide(self, own: Before) -> Division:
        """Divides the free memory of the fullest rank into KV cache and graph pools.

        The KV cache must hold one request of max_model_len.
        """
        total, free = self.agreement.least(own.total, own.free)
        before = dataclasses.replace(own, total=total, others=own.others + total - free - own.taken)
        config, limits, settings = self.config, self.limits, self.paper.settings
        block = self.sized.block_bytes(limits.block_size)
        of, multimodal = self.backend.policy.utilisation_of, self.model_config.vision is not None
        args = (before, config.gpu_memory_utilization, of, settings, block, multimodal)
        division = divide(*args)
        fits = division.blocks * limits.block_size
        if config.max_model_len is None and 0 < fits < limits.max_model_len:
            self.limits = dataclasses.replace(limits, max_model_len=fits)
        else:
            division = check_room(*args, needed=limits.row_blocks, max_model_len=limits.max_model_len)
        asked = kv_asked(config, block)
        return division if asked is None else divide(*args, kv_bytes=asked)

    def _kv(self, model: Model, division: Division) -> CachePlan:
        """Makes the KV cache, in place of the small one."""
        limits, block = self.limits, self.sized.block_bytes(self.limits.block_size)
        self.progress("caches", f"{division.blocks} blocks, {gib(division.kv)} of KV cache", 0.7)
        self._drop_kv(model)
        (held,) = self.agreement.least(self.backend.kv_blocks(division.blocks + RESERVED_BLOCKS, block))
        held -= RESERVED_BLOCKS
        self.persistent.kv = kv_cache(self.model_config, self.backend, held, limits.block_size)
        model.bind(self.persistent)
        self.meter.book("kv")
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
            arena_bytes=self.meter.rows["arena"],
            weights_bytes=self.meter.rows["weights"],
            notes=(*self.backend.notes, *self.paper.plan.notes, *self._said(), *_backed(held, division.blocks)),
        )

    def _drop_kv(self, model: Model) -> None:
        """Binds empty tensors in place of the small cache, which the bodies hold through the model."""
        self.persistent.kv = kv_cache(self.model_config, self.backend, -RESERVED_BLOCKS, self.limits.block_size)
        model.bind(self.persistent)
        self.meter.book("profile")

    def _said(self) -> list[str]:
        """Notes of the paper plan that users must know, and what a skipped warm-up costs where nothing is captured."""
        found = [n for n in self.paper.notes if n.startswith(("max_model_len", "graphs:"))]
        mode, count = self.backend.policy.graphless, len(self.paper.plan.buckets)
        if mode and self.config.warmup == "skip":
            found.append(
                f"warm-up is skipped: in {mode} the first launch of each of {count} shapes waits for the compiler, "
                "seconds or more on a card; a recipe cache of an earlier start saves most of that"
            )
        return found

    def _captures(self, runner: Runner, division: Division) -> Captures:
        block = self.sized.block_bytes(self.limits.block_size)
        return Captures(
            runner.graphs,
            self.meter.before(),
            division,
            self.paper.settings,
            self.paper.prices,
            multimodal=self.model_config.vision is not None,
            least_kv=(self.limits.row_blocks + RESERVED_BLOCKS) * block,
            block_bytes=block,
            journal=Journal(self.config.skip_captures, self.progress.capture),
        )

    def _warm(self, runner: Runner, captures: Captures) -> GraphWatch:
        """Warms up as configured; with ``skip`` every bucket is prepared at its first use."""
        mode = self.config.warmup
        warmup = Warmup(runner.graphs, captures, self.config.strict_warmup, Throttle(self.progress))
        watch = GraphWatch(runner.graphs, captures, mode, warmup if mode != "skip" else None)
        warmup.keep = self._keep
        warmup.warmed = getattr(self.backend, "warmed", warmup.warmed)
        if mode == "full":
            warmup.full()
        elif mode == "background":
            runner.warmup = warmup
        else:
            runner.graphs.first_use = self._first_use
        captures.observe()
        if mode != "full":
            self._keep()
        return watch

    def _first_use(self, bucket: Bucket) -> None:
        self.captures.at_first_use(bucket)
        self._keep()

    def _keep(self) -> None:
        """Stores measurements for ``--graph-memory auto`` and ``trencadis plan``.

        After a full warm-up, the ledger's activations are final. Without one, other programs may have changed the
        device's free memory since, so that the profile's figures are kept.
        """
        if self.backend.comm.rank:
            return
        captures, full = self.captures, self.config.warmup == "full"
        settled = captures.ledger.before.activations
        most = max(self.profiled.values(), default=0)
        held = {b: settled if full and count == most else count for b, count in self.profiled.items()}
        new = measured.Measured(dict(captures.measured), dict(captures.graphs.took), held)
        measured.keep(self.key, new, measured.folder(), complete=full)


def _backed(held: int, booked: int) -> list[str]:
    """The line about an imitated card, whose KV cache is smaller than its ledger says."""
    return [] if held == booked else [f"{booked} KV blocks are booked; the host backs {held} of them."]
