"""The CPU backend, which is also the reference of the others."""

from trencadis.backends.cpu.backend import CpuBackend
from trencadis.core.backend import Backend, BackendConfig


def make_backend(cfg: BackendConfig) -> Backend:
    """``core.backend.load("cpu")``."""
    return CpuBackend(cfg)
