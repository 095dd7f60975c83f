"""The device ``numpy``: ``trencadis serve --device numpy`` finds it by its entry point."""

from __future__ import annotations

import torch

from trencadis.core.device.backend import Backend, BackendConfig
from trencadis.core.device_shape_policy import Policy
from trencadis.core.errors import StartupError
from trencadis_numpy.backend import POLICY, NumpyBackend

__all__ = ["make_backend", "pick_dtype", "pick_policy"]


def make_backend(cfg: BackendConfig) -> Backend:
    """The entry point names this function; the two below are looked up in its module."""
    if cfg.world != 1:
        raise StartupError(f"the numpy backend runs one rank, not {cfg.world}")
    return NumpyBackend(cfg)


def pick_dtype(requested: str, stored: str) -> torch.dtype:
    """float32, whatever is stored: numpy has no bfloat16."""
    if requested not in ("auto", "float32", "float"):
        raise StartupError(f"--dtype {requested} is not supported on numpy; use float32")
    return torch.float32


def pick_policy(name: str) -> Policy:
    """The one policy."""
    if name:
        raise StartupError(f"the numpy backend has no policy {name!r}")
    return POLICY
