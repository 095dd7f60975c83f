"""``--attention-backend`` for one backend: the selected library, or none, and notes for the user.

A library attends to text where it can be used; the device's own attention does the rest: what the library does not
take, and launches of so few tokens that layers run in six launches, which hold their attention.

Without the flag FlashAttention 3 attends to prompts on Hopper where it is installed and agrees with the device's own
attention at the start: its kernels reach about twice the share of the peak. Decoding and verifying rows keep their own,
which share the work of a row's keys evenly over all processors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trencadis.backends.cuda.attention_libraries.attention_library_selector import (
    SelectedLibrary,
    check_blocks,
    find_flash_3,
    select_library,
    unsupported_reason,
)
from trencadis.backends.cuda.attention_libraries.library_attention import (
    FlashAttnLaunch,
    FlashInferLaunch,
    FlashInferWorkspaces,
    LibraryLaunch,
)
from trencadis.backends.cuda.attention_libraries.startup_comparison import find_disagreement
from trencadis.backends.cuda.backend import CudaBackend
from trencadis.backends.cuda.cpu_offloaded_layers import HostLayerOps
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn
from trencadis.backends.cuda.kernels.layers import skinny_gemm
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.backends.cuda.runtime_protocol import Runtime
from trencadis.backends.cuda.shape_policy import OWN_KERNELS
from trencadis.core.buckets import Stage, padded_tokens
from trencadis.core.device.backend import Attn, BackendConfig, Body, LayerKV

log = logging.getLogger("trencadis.engine")

T = TypeVar("T", bound=HostLayerOps)

TEXT = Stage.PREFILL, Stage.DECODE, Stage.VERIFY
OURS = "attention of text: this engine's own kernels"


class LibraryAttention:
    """Mixin for attention by the library ``found``; the class that it is mixed into supplies the other ops."""

    found: SelectedLibrary
    launch: LibraryLaunch | None = None
    """The library's part of the launch that is running."""

    _logged: frozenset[str] = frozenset()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        why = "attention sinks" if sinks is not None else self._unsupported_reason(kv, attn, window)
        if not why and self.launch is not None:
            return self.launch.attend(q, kv, scale, window)
        if why and why not in self._logged:
            self._logged |= {why}
            log.info("%s does not attend to %s: this engine's own kernels do", self.found.label, why)
        given = {} if sinks is None else {"sinks": sinks}
        out: Tensor = super().attend(q, k, v, kv, attn, scale, window, **given)  # type: ignore[misc]
        return out

    def _unsupported_reason(self, kv: LayerKV, attn: Attn, window: int) -> str:
        if kv.k_scale is not None:
            return "an 8-bit KV cache"
        if getattr(attn, "upto", None) is not None:
            return "tokens that see keys after their own position"
        if window and not self.found.limits.windows:
            return "layers with a window of keys"
        return ""


def with_library(ops: type[T], found: SelectedLibrary) -> type[T]:
    """Returns a subclass of ``ops`` whose attention is the library's."""
    made: Any = type(f"Library{ops.__name__}", (LibraryAttention, ops), {"found": found})
    return made  # type: ignore[no-any-return]


class AttentionLibraryAdapter:
    """Implements ``backend.AttentionLibrary``.

    Args:
        ops: from ``with_library``.
        head_dim: values of a head; ``dtype``: of the cache.
        stages: those whose launches the library attends in.
    """

    def __init__(
        self, ops: Any, runtime: Runtime, head_dim: int, dtype: torch.dtype, stages: tuple[Stage, ...] = TEXT
    ) -> None:
        self.ops, self._runtime, self._head_dim, self._dtype = ops, runtime, head_dim, dtype
        self._stages = stages
        self._workspaces = FlashInferWorkspaces(runtime)

    def wrap_body(self, buffers: InputBuffers, body: Body) -> Body:
        """Wraps ``body`` with the library's launches; text buckets are planned whenever their buffers are filled.

        Buckets of few tokens stay as they are where layers are fused.
        """
        bucket = buffers.bucket
        if bucket.stage not in self._stages:
            return body
        if self.ops.fuses_layers and padded_tokens(bucket) <= skinny_gemm.FEW:
            return body
        launch = self._launch(buffers)
        if launch.plans:
            buffers.on_copy = launch.plan
        return self._wrap(launch, body)

    def _launch(self, buffers: InputBuffers) -> LibraryLaunch:
        found, bucket, sizes = self.ops.found, buffers.bucket, buffers.sizes
        if found.kind == "flashinfer":
            return FlashInferLaunch(found.calls, buffers, self._runtime, self._workspaces, self._head_dim, self._dtype)
        return FlashAttnLaunch(found.calls["attend"], found.kind, bucket, sizes)

    def _wrap(self, launch: LibraryLaunch, body: Body) -> Callable[[Any], Any]:
        def run(inputs: Any) -> Any:
            attn: ItemAttn = inputs.attn
            self.ops.launch = launch
            try:
                launch.begin(attn)
                return body(inputs)
            finally:
                self.ops.launch = None

        return run


OPTION = "attention"
"""Key of ``BackendConfig.options`` that names a library; empty: none."""


class RequestedAttention(NamedTuple):
    """The attention to use: a library, or None for the engine's own kernels, and notes that explain it.

    ``asked`` is False for a library that the flag does not name: it attends to prompts alone, if a comparison at the
    start finds its values right.
    """

    library: SelectedLibrary | None
    notes: tuple[str, ...] = ()
    asked: bool = True

    @classmethod
    def of(cls, cfg: BackendConfig, arch: int) -> RequestedAttention:
        """Returns what ``cfg`` requests, for a card of ``arch``.

        Raises:
            StartupError: the library is missing, or does not support KV blocks of this size.
        """
        name = (cfg.options or {}).get(OPTION, "")
        if not name:
            return cls._by_default(cfg, arch)
        if name == OWN_KERNELS:
            return cls(None, (f"{OURS} (--attention-backend {name})",))
        found = select_library(name, arch)
        if why := unsupported_reason(found, cfg):
            note = f"--attention-backend {name}: {found.label} attends to nothing here, this engine's own kernels do: "
            return cls(None, (note + why,))
        check_blocks(found, name, cfg.block_size)
        return cls(found, (f"attention of text: {found.label} (--attention-backend {name})",))

    @classmethod
    def _by_default(cls, cfg: BackendConfig, arch: int) -> RequestedAttention:
        found = find_flash_3(arch)
        if found is None:
            return cls(None, (OURS,))
        why = "layers of this model have attention sinks" if cfg.sinks else unsupported_reason(found, cfg)
        if why or not cfg.head_dim:
            return cls(None, (f"{OURS}, not {found.label}: {why or 'the size of heads is unknown'}",))
        return cls(found, asked=False)

    def ops(self, kind: type[T]) -> type[T]:
        """Returns ``kind``, with the library's attention if there is one."""
        return kind if self.library is None else with_library(kind, self.library)

    def attach(self, backend: CudaBackend) -> CudaBackend:
        """Adds the library and the notes to ``backend``, whose ops are made by ``ops``, and returns it."""
        backend.notes += self.notes
        found, ops = self.library, backend.ops
        if found is None or not isinstance(ops, LibraryAttention):
            return backend
        stages: tuple[Stage, ...] = TEXT
        if not self.asked:
            why = find_disagreement(found, backend)
            backend.notes += (f"{OURS}, not {found.label}: {why}" if why else prompts_note(found),)
            if why:
                return backend
            stages = (Stage.PREFILL,)
        backend.library = AttentionLibraryAdapter(ops, backend.runtime, backend.cfg.head_dim, backend.dtype, stages)
        return backend


def prompts_note(found: SelectedLibrary) -> str:
    """Returns the line about a library that attends to prompts by default."""
    return (
        f"attention of prompts: {found.label}, which is installed and agrees with this engine's own kernels; of other "
        f"launches: these (--attention-backend {OWN_KERNELS}: of all)"
    )
