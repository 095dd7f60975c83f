"""``--attention-backend`` for one backend: the library, or that there is none, and what users are told."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from trencadis.backends.cuda.backend import CudaBackend
from trencadis.backends.cuda.host_layers import HostLayerOps
from trencadis.backends.cuda.libraries.ops import AttentionLibraryAdapter, LibraryAttention, with_library
from trencadis.backends.cuda.libraries.selector import SelectedLibrary, check_blocks, select_library, unsupported_reason
from trencadis.core.backend import BackendConfig

T = TypeVar("T", bound=HostLayerOps)

OPTION = "attention"
"""The key of ``BackendConfig.options`` that names a library; empty: none."""


class RequestedAttention(NamedTuple):
    """The attention that was requested: a library, or None for the engine's own kernels, and notes that say why."""

    library: SelectedLibrary | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: BackendConfig, arch: int) -> RequestedAttention:
        """What ``cfg`` asks for, for a card of ``arch``.

        Raises:
            StartupError: a library that is not there, or takes no KV blocks of this size.
        """
        name = (cfg.options or {}).get(OPTION, "")
        if not name:
            return cls(None)
        found = select_library(name, arch)
        if why := unsupported_reason(found, cfg):
            note = f"--attention-backend {name}: {found.label} attends to nothing here, this engine's own kernels do: "
            return cls(None, (note + why,))
        check_blocks(found, name, cfg.block_size)
        return cls(found, (f"attention of text: {found.label} (--attention-backend {name})",))

    def ops(self, kind: type[T]) -> type[T]:
        """``kind``, with the library's attention if there is one."""
        return kind if self.library is None else with_library(kind, self.library)

    def attach(self, backend: CudaBackend) -> CudaBackend:
        """``backend``, whose ops are made by ``ops``, with the library and the notes."""
        backend.notes += self.notes
        if isinstance(backend.ops, LibraryAttention):
            backend.library = AttentionLibraryAdapter(backend.ops, backend.runtime, backend.cfg.head_dim, backend.dtype)
        return backend
