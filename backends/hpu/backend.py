"""The backend for a Gaudi, real or emulated."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trencadis.backends.fault_injection_hooks import Hooks
from trencadis.backends.hpu.attention.prefill_attention import check_bucket
from trencadis.backends.hpu.habana_bridge import Bridge, emulator_hooks
from trencadis.backends.hpu.hccl_comm import HpuComm, HpuPipe
from trencadis.backends.hpu.hpu_settings import HpuSettings, require_symbols, settings
from trencadis.backends.hpu.launches.block_copies import HpuBlockCopies
from trencadis.backends.hpu.launches.hpu_host_arrays import LaunchForm
from trencadis.backends.hpu.launches.hpu_program import CompiledProgram, GraphProgram, HpuProgram, LaunchContexts
from trencadis.backends.hpu.launches.input_and_output_copies import HostOutputPool, HpuPending, Staging, named_errors
from trencadis.backends.hpu.ops import HpuOps
from trencadis.backends.hpu.recurrent_check import check_recurrent
from trencadis.backends.hpu.shape_policy import without_fp8
from trencadis.backends.hpu.start.bridge_loader import open_bridge
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import (
    BackendConfig,
    Body,
    Comm,
    Inputs,
    Memory,
    Ops,
    Pipe,
    Program,
    TensorsOut,
)
from trencadis.core.device_shape_policy import Policy
from trencadis.core.envs import get_bool
from trencadis.core.executor.rendezvous import join_group
from trencadis.core.graphs.graph_manager import EventStopwatch, Stopwatch
from trencadis.core.vision_config import NO_SLOT, SlotForm


class HpuMemory:
    """Memory of the card in bytes (``core.device.backend.Memory``).

    ``real_kv_bytes``: host memory that the KV caches of an emulated card may take; None: no limit.
    """

    def __init__(self, bridge: Bridge, backed: int | None = None) -> None:
        self._bridge, self._backed = bridge, backed

    def total(self) -> int:
        return self._bridge.mem_get_info()[1]

    def free(self) -> int:
        return self._bridge.mem_get_info()[0]

    def real_kv_bytes(self) -> int | None:
        return self._backed


log = logging.getLogger("trencadis.engine")

KINDS = {
    "graph_compilation": ("VLLM_HPU_STEP_GRAPH_COMPILATION", "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION"),
    "cpu_fallback": ("VLLM_HPU_STEP_CPU_FALLBACK", "VLLM_HPU_LOG_STEP_CPU_FALLBACKS"),
}
"""Metric of the plug-in -> (start of a log line, variable that enables it)."""


@dataclass
class OpenMetric:
    """One metric that is open for the life of the process, and its last values."""

    word: str
    metric: Any
    always: bool
    scope: AbstractContextManager[Any]
    before: tuple[tuple[str, Any], ...]


class StepLog:
    """Compares the plug-in's counters around each launch.

    ``begin`` is called when a launch's inputs are filled, ``end`` when its results are fetched; whatever was counted in
    between belongs to that launch. Without the variables nothing is opened or read.

    Args:
        metrics: ``metric_localcontext`` of the plug-in.
    """

    def __init__(self, environ: Mapping[str, str], metrics: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._launch = ""
        self._counted: list[OpenMetric] = []
        for name, (word, variable) in KINDS.items():
            always = get_bool(f"{variable}_ALL", environ)
            if always or get_bool(variable, environ):
                scope = metrics(name)
                metric = scope.__enter__()
                self._counted.append(OpenMetric(word, metric, always, scope, _stats(metric)))

    def begin(self, launch: str) -> None:
        """Starts counting for a launch; logs the launch before it, which has run."""
        if self._counted:
            self.end()
            self._launch = launch
            for one in self._counted:  # what warm-up compiled since then belongs to no launch
                one.before = _stats(one.metric)

    def end(self) -> None:
        """Logs what the last launch counted."""
        if not self._launch:
            return
        for one in self._counted:
            now = _stats(one.metric)
            events = now[0][1] - one.before[0][1]
            if events or one.always:
                log.warning("%s: %s, events %d, totals %s", one.word, self._launch, events, dict(now))
            one.before = now
        self._launch = ""


def _stats(metric: Any) -> tuple[tuple[str, Any], ...]:
    """Returns (name, value) pairs; the first is the number of events."""
    return tuple((name, dict(value) if isinstance(value, dict) else value) for name, value in metric.stats())


EMULATED = (
    "hpu (emulated): no Gaudi computes here. Answers, shapes and the ledger are those of the card's code path; "
    "times and speeds mean nothing."
)


class EmulatedStopwatch:
    """Measures launches of an emulated card in virtual seconds.

    Args:
        launched: virtual seconds that launches have taken so far.
    """

    def __init__(self, launched: Callable[[], float]) -> None:
        self._launched = launched
        self._begun = self._ended = launched()

    def stop(self) -> None:
        self._ended = self._launched()

    def read(self) -> float | None:
        return self._ended - self._begun


class HpuBackend:
    """``core.device.backend.Backend``.

    Args:
        bridge: where the device's symbols come from; None: whatever this machine has.
    """

    name = "hpu"
    slot: SlotForm = NO_SLOT

    def __init__(
        self, cfg: BackendConfig, policy: Policy, bridge: Bridge | None = None, switches: HpuSettings | None = None
    ) -> None:
        self.cfg, self.policy = cfg, policy
        named = (cfg.options or {}).get("card_named") == "1"
        here, grouped = cfg.cards, cfg.ranks > 1  # a group over several machines may have one card of each
        self.bridge = bridge or open_bridge(cfg.card, world=here, rank=cfg.card - cfg.index, named=named, hccl=grouped)
        if self.bridge.cast_to_fp8_v2 is None:
            self.policy = without_fp8(policy)
        self._switches = switches
        self.settings = switches or settings(os.environ, cfg.options)
        require_symbols(self.settings, self.bridge)
        if cfg.sinks:  # the fused kernel has none
            self.settings = replace(self.settings, fused_sdpa=False)
        emulator = self._emulator = emulator_hooks(self.bridge)
        self.label, self.values = self.bridge.label, emulator is None or emulator.values
        self.device: torch.device = self.bridge.device
        self.dtype = cfg.dtype
        self.hpu_ops = self._make_ops()
        self.ops: Ops = self.hpu_ops
        if cfg.recurrent and self.values:
            check_recurrent(self._make_ops())  # ops of its own, so that nothing of the check stays on the card
        self.memory: Memory = HpuMemory(self.bridge, None if emulator is None else emulator.backed)
        if self.values:  # a card without values simulates one rank, so it joins no group
            join_group(cfg, self.bridge.collective_backend)
        comm = HpuComm(self.bridge, cfg, alone=not self.values, opaque=self.settings.eager_collectives)
        if self.values:
            comm.check_compiled()
        self.comm: Comm = comm
        self._staging, self._landing = Staging(self.bridge), HostOutputPool(self.bridge)
        alone = not self.values
        self.pipe: Pipe | None = HpuPipe(self.bridge, cfg, self._staging, alone) if cfg.stages > 1 else None
        self.notes: tuple[str, ...] = (*(() if emulator is None else (EMULATED,)), *self.bridge.notes)
        self.hooks = Hooks() if emulator is None else Hooks(emulator.run_out, emulator.no_sync)
        self._contexts = (
            LaunchContexts() if emulator is None else LaunchContexts(emulator.launch, self.bridge.compile_only)
        )
        timed = self.bridge.timed_event
        self.start_stopwatch: Callable[[], Stopwatch] | None = None if timed is None else partial(EventStopwatch, timed)
        if emulator is not None:
            self.start_stopwatch = partial(EmulatedStopwatch, emulator.launched)
        self._compiled = self.bridge.metric_localcontext("graph_compilation")
        self._metric = self._compiled.__enter__()
        self._fallen = self.bridge.metric_localcontext("cpu_fallback")
        self._fallbacks = self._fallen.__enter__()
        self._steplog = StepLog(os.environ, self.bridge.metric_localcontext)

    def _make_ops(self) -> HpuOps:
        cfg = self.cfg
        args = (self.bridge, self.settings, cfg.block_size)
        groups = tuple(-(-(cfg.kv_heads if window else cfg.full_kv_heads) // cfg.world) for window in cfg.windows)
        groups = groups if cfg.full_kv_heads else ()
        if self._emulator is None:
            return HpuOps(*args, dtype=self.dtype, windows=cfg.windows, window_groups=groups)
        layer = self._emulator.layer
        emulator = self._emulator
        return HpuOps(
            *args, run_layer=layer, dtype=self.dtype, windows=self.cfg.windows, check_context=emulator.launch,
            values=emulator.values, window_groups=groups,
        )  # fmt: skip

    def beside(self, cfg: BackendConfig) -> HpuBackend:
        """Returns a backend for a second model on the same card (``core.launches.draft_runner.SharedDevice``).

        Its settings are those of its own family and kind of attention.
        """
        made = HpuBackend(cfg, self.policy, self.bridge, self._switches)
        made._staging, made._landing = self._staging, self._landing
        return made

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        """Returns the number of KV blocks to allocate: ``wanted``, but on an emulated card no more than the host's
        memory allows.
        """
        return wanted if self._emulator is None else self._emulator.hold_blocks(wanted, block_bytes)

    def warmed(self) -> None:
        """Called once every planned bucket is compiled; with ``VLLM_FULL_WARMUP`` guards are skipped from then on.

        A compilation is an error then.
        """
        if not self.settings.full_warmup or self.hpu_ops.lazy:
            return
        try:
            torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        except (AttributeError, TypeError):
            log.warning("VLLM_FULL_WARMUP has no effect: torch %s cannot skip guards.", torch.__version__)

    def compilations(self) -> int:
        """Recipes compiled since this backend was made."""
        return self.bridge.compilations(self._metric)

    def fallbacks(self) -> int:
        """Operations that ran on the host's CPU since this backend was made."""
        return self.bridge.compilations(self._fallbacks)

    def graph_breaks(self) -> int:
        """Parts that are compiled with graph breaks, because Dynamo could not trace them as one graph."""
        return len(self.hpu_ops.compiler.broken)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of zeros on the card; an emulated card backs large tensors page by page as they are
        written.
        """
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def block_copies(self, tensors: Sequence[Tensor]) -> HpuBlockCopies:
        """Builds the block copies between card and host (``core.launches.host_block_copies.PlanningBackend``)."""
        return self._copies(tensors, self.cfg.block_size, self.policy.host_blocks)

    def state_copies(self, tensors: Sequence[Tensor]) -> HpuBlockCopies:
        """Builds the copies of recurrent states, one for each launch; see ``block_copies``."""
        return self._copies(tensors, 1, (1,))

    def _copies(self, tensors: Sequence[Tensor], rows: int, sizes: Sequence[int]) -> HpuBlockCopies:
        compile = self.hpu_ops.compiler.compile
        return HpuBlockCopies(self.bridge, tensors, rows, sizes, self._contexts, self._staging, compile)

    def program(self, bucket: Bucket, body: nn.Module | Body) -> GraphProgram | CompiledProgram:
        check_bucket(bucket, self.cfg.block_size, self.settings.context_slice)
        cfg, lazy = self.cfg, self.bridge.is_lazy()
        form = LaunchForm(
            cfg.block_size, cfg.vocab_size, self.slot, any(cfg.windows), cfg.upto, shared=not lazy,
            recurrent=cfg.recurrent,
        )  # fmt: skip
        kind = GraphProgram if lazy else CompiledProgram
        made = kind(bucket, body, self.bridge, self.hpu_ops, form, self._contexts)
        made.static.staging, made.landing = self._staging, self._landing
        made.compiles_for_real = bucket.stage is Stage.VISION and self.settings.vision_compiles_for_real(lazy)
        return made

    def fill(self, program: Program, inputs: Inputs) -> None:
        assert isinstance(program, HpuProgram)
        self._steplog.begin(str(program.bucket))
        with named_errors(self.bridge):
            program.fill(inputs)

    def fetch(self, out: TensorsOut, rows: int) -> HpuPending:
        self._steplog.end()
        with named_errors(self.bridge):
            return HpuPending(out, rows, self._landing)

    def synchronize(self) -> None:
        with named_errors(self.bridge):
            self.bridge.synchronize()
