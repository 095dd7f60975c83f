"""NVIDIA cards, by Triton kernels.

Torch-free to import, because the planner reads ``policy`` without a device; the device's half is imported when asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trencadis.backends.cuda.policy import policy as pick_policy

if TYPE_CHECKING:
    import torch

    from trencadis.core.backend import Backend, BackendConfig

__all__ = ["make_backend", "pick_dtype", "pick_policy"]


def make_backend(cfg: BackendConfig) -> Backend:
    """``core.backend.load("cuda")``.

    Raises:
        StartupError: no card, no Triton, or a card or model that the kernels do not take; the line says what works.
    """
    from trencadis.backends.cuda import capability

    capability.check_model(cfg)
    device = capability.pick_device(cfg.index)
    from trencadis.backends.cuda.backend import CudaBackend  # imports triton, which may be missing

    return CudaBackend(cfg, device)


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """The dtype that a card computes in."""
    from trencadis.backends.cuda import dtypes

    return dtypes.pick_dtype(asked, stored)
