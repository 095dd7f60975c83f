"""``--attention-backend`` for one backend: the library, or that there is none, and what users are told."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from trencadis.backends.cuda.backend import CudaBackend
from trencadis.backends.cuda.host_layers import HostLayerOps
from trencadis.backends.cuda.libraries.choice import Chosen, check_blocks, chosen, unserved
from trencadis.backends.cuda.libraries.ops import Library, LibraryAttention, with_library
from trencadis.core.backend import BackendConfig

T = TypeVar("T", bound=HostLayerOps)

OPTION = "attention"
"""The key of ``BackendConfig.options`` that names a library; empty: none."""


class AskedAttention(NamedTuple):
    """What attends: ``found``, or this engine's kernels; ``notes`` say why."""

    found: Chosen | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: BackendConfig, arch: int) -> AskedAttention:
        """What ``cfg`` asks for, for a card of ``arch``.

        Raises:
            StartupError: a library that is not there, or takes no KV blocks of this size.
        """
        name = (cfg.options or {}).get(OPTION, "")
        if not name:
            return cls(None)
        found = chosen(name, arch)
        if why := unserved(found, cfg):
            note = f"--attention-backend {name}: {found.label} attends to nothing here, this engine's own kernels do: "
            return cls(None, (note + why,))
        check_blocks(found, name, cfg.block_size)
        return cls(found, (f"attention of text: {found.label} (--attention-backend {name})",))

    def ops(self, kind: type[T]) -> type[T]:
        """``kind``, with the library's attention if there is one."""
        return kind if self.found is None else with_library(kind, self.found)

    def joined(self, backend: CudaBackend) -> CudaBackend:
        """``backend``, whose ops are made by ``ops``, with the library and the notes."""
        backend.notes += self.notes
        if isinstance(backend.ops, LibraryAttention):
            backend.library = Library(backend.ops, backend.runtime, backend.cfg.head_dim, backend.dtype)
        return backend
