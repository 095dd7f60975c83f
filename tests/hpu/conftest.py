"""An emulated card, and the backend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.refusals import parse
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.policy import policy
from trencadis.core.device.backend import BackendConfig


@pytest.fixture
def card() -> EmulatedDevice:
    """A Gaudi 2 that computes; new tensors of the test go to it."""
    device = EmulatedDevice(profile(""))
    make_bridge(device)
    return device


@pytest.fixture
def hpu() -> Callable[..., Any]:
    """``hpu(block_size=4, faults="oom@capture:1")``: a backend on a card of its own."""

    def make(*, faults: str = "", computes: bool = True, lazy: bool = True, kernels: bool = True, **cfg: Any) -> Any:
        import dataclasses

        device = EmulatedDevice(profile(""), computes, parse(faults))
        bridge = make_bridge(device, lazy)
        if not kernels:
            missing = ("fused_sdpa", "fused_rms_norm", "apply_rotary", "sdpa_parts", "product", "block_adjustment")
            without: dict[str, Any] = dict.fromkeys(missing)
            bridge = dataclasses.replace(bridge, **without)
        switches = cfg.pop("switches", HpuSettings(fp32_softmax_vision=True))
        backend = HpuBackend(BackendConfig(**cfg), policy(""), bridge, switches)
        backend.card = device  # type: ignore[attr-defined]
        return backend

    return make
