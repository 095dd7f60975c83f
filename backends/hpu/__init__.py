"""Intel Gaudi (HPU), or an emulation of one where no Gaudi is present.

Torch-free to import, because the planner reads ``policy`` without a device; the device's half is imported when asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trencadis.backends.hpu.policy import policy as pick_policy

if TYPE_CHECKING:
    import torch

    from trencadis.core.backend import Backend, BackendConfig

__all__ = ["make_backend", "pick_dtype", "pick_policy"]


def make_backend(cfg: BackendConfig) -> Backend:
    """``core.backend.load("hpu")``."""
    from trencadis.backends.hpu.backend import HpuBackend

    return HpuBackend(cfg, pick_policy((cfg.options or {}).get("policy", "")))


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """The dtype that a Gaudi computes in."""
    from trencadis.backends.hpu import dtypes

    return dtypes.pick_dtype(asked, stored)
