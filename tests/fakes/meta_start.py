"""The whole start-up of a device on an emulated card without values, for models that exist as sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import Profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine.device_startup import DeviceStart
from trencadis.core.engine.startup_plan import DryRun, StartupPlan
from trencadis.core.engine.startup_plan import PlannedDevice as Paper
from trencadis.core.engine_config import EngineConfig
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_reporter import GraphReporter
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.memory import graph_measurement_cache
from trencadis.core.memory.cache_plan import CachePlan
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.startup_progress_and_warmup_pacing import SilentProgress

GIB = 1 << 30


@dataclass
class Started:
    """A start-up that came up, and the card that it ran on."""

    start: DeviceStart
    runner: ModelRunner
    cache: CachePlan
    limits: ShapeLimits
    watch: GraphReporter
    captures: GraphCaptures
    card: EmulatedDevice

    @property
    def rows(self) -> dict[str, int]:
        """The ledger."""
        return dict(self.captures.ledger.rows())


def card(total: int) -> EmulatedDevice:
    """An emulated card of ``total`` bytes that keeps shapes alone."""
    return EmulatedDevice(Profile("card", total), computes=False)


def backend(
    model: ModelConfig, on: EmulatedDevice, ranks: int, max_tokens: int, max_rows: int, bridge: Bridge
) -> HpuBackend:
    """Rank 0 of ``ranks`` in bfloat16."""
    full = model.text.full_heads
    cfg = BackendConfig(
        dtype=torch.bfloat16,
        block_size=128,
        max_tokens=max_tokens,
        max_rows=max_rows,
        vocab_size=model.text.vocab,
        windows=model.text.windows,
        kv_heads=model.text.kv_heads,
        full_kv_heads=full.kv_heads if full is not None else 0,
        full_head_dim=full.head_dim if full is not None else 0,
        upto=model.text.upto,
        recurrent=model.text.recurrent is not None,
        world=ranks,
    )
    return HpuBackend(cfg, SERVING, bridge, HpuSettings())


def config_of(**flags: Any) -> EngineConfig:
    """The guide's line, and ``flags``."""
    line = {"max_model_len": 32768, "max_num_seqs": 128, "max_num_batched_tokens": 32768}
    return EngineConfig(**{**line, "block_size": 128, "load_format": "dummy", "device": "hpu", **flags})


def run(
    model: ModelConfig, config: EngineConfig, images: ImageNeeds, on: EmulatedDevice, ranks: int = 1,
    made: HpuBackend | None = None, bridge: Bridge | None = None,
) -> Started:  # fmt: skip
    """All of ``DeviceStart``; what images need is given, because there is no checkpoint to read it from."""
    limits = config.max_num_batched_tokens or 8192, config.max_num_seqs or 256
    device = made or backend(model, on, ranks, *limits, bridge or make_bridge(on))
    start = DeviceStart.plan(config, model, device, SilentProgress(), images)
    return Started(start, *start.run(), on)


def on_paper(model: ModelConfig, config: EngineConfig, images: ImageNeeds, total: int, ranks: int = 1) -> StartupPlan:
    """What ``trencadis plan`` computes, with the measurements of an earlier start where there are some."""
    key = graph_measurement_cache.MeasurementKey(
        graph_measurement_cache.fingerprint(model), "hpu (emulated)", "16 bit", ranks, 128
    )
    known = graph_measurement_cache.load(key, graph_measurement_cache.folder())
    return DryRun(
        config, model, SERVING, BucketOptions(), images, Paper("hpu", total, 0, ranks, 2), known
    ).plan_startup()
