"""The CPU backend, which is also the reference for the other backends."""

from trencadis.backends.cpu.backend import CpuBackend, pick_dtype
from trencadis.backends.cpu.shape_policy import policy as pick_policy
from trencadis.core.device.backend import Backend, BackendConfig

__all__ = ["make_backend", "pick_dtype", "pick_policy"]


def make_backend(cfg: BackendConfig) -> Backend:
    """Builds the CPU backend for ``core.device.backend.load("cpu")``."""
    return CpuBackend(cfg)
