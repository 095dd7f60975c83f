"""``--attention-backend`` for one backend: the selected library, or none, and notes for the user."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from trencadis.backends.cuda.backend import CudaBackend
from trencadis.backends.cuda.host_layers import HostLayerOps
from trencadis.backends.cuda.libraries.ops import AttentionLibraryAdapter, LibraryAttention, with_library
from trencadis.backends.cuda.libraries.selector import SelectedLibrary, check_blocks, select_library, unsupported_reason
from trencadis.core.device.backend import BackendConfig

T = TypeVar("T", bound=HostLayerOps)

OPTION = "attention"
"""Key of ``BackendConfig.options`` that names a library; empty: none."""


class RequestedAttention(NamedTuple):
    """The requested attention: a library, or None for the engine's own kernels, and notes that explain it."""

    library: SelectedLibrary | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: BackendConfig, arch: int) -> RequestedAttention:
        """Returns what ``cfg`` requests, for a card of ``arch``.

        Raises:
            StartupError: the library is missing, or does not support KV blocks of this size.
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
        """Returns ``kind``, with the library's attention if there is one."""
        return kind if self.library is None else with_library(kind, self.library)

    def attach(self, backend: CudaBackend) -> CudaBackend:
        """Adds the library and the notes to ``backend``, whose ops are made by ``ops``, and returns it."""
        backend.notes += self.notes
        if isinstance(backend.ops, LibraryAttention):
            backend.library = AttentionLibraryAdapter(backend.ops, backend.runtime, backend.cfg.head_dim, backend.dtype)
        return backend
