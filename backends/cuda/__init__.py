"""Backend for NVIDIA cards, by Triton kernels.

Torch-free to import, because the planner reads ``policy`` without a device; torch and Triton are imported when needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trencadis.backends.cuda.shape_policy import policy as pick_policy
from trencadis.backends.cuda.visible_devices import card_nodes, count_cards
from trencadis.core import envs
from trencadis.core.errors import StartupError

if TYPE_CHECKING:
    import torch

    from trencadis.backends.cuda.backend import CudaBackend
    from trencadis.backends.cuda.kernels.gpu_platform import Accelerator
    from trencadis.backends.cuda.runtime_protocol import Runtime
    from trencadis.core.device.backend import Backend, BackendConfig, Comm

__all__ = ["cards", "has_card", "listing", "make_backend", "pick_dtype", "pick_policy", "runtime_of", "usable"]


def make_backend(cfg: BackendConfig, cards: Accelerator | None = None) -> Backend:
    """Builds the CUDA backend; the policy ``twin`` or TRENCADIS_CUDA_TWIN selects the CPU twin of a card.

    Args:
        cards: the kind of card, of a package that has this backend run on another; None: NVIDIA's. Such a package
            checks its cards itself.

    Raises:
        StartupError: no card, no Triton, or a card or model that the kernels do not support; the message says what
        works.
    """
    from trencadis.backends.cuda.kernels import gpu_platform

    gpu_platform.use(cards or gpu_platform.Accelerator())
    if _is_twin((cfg.options or {}).get("policy", "")):
        return _twin(cfg)
    from trencadis.backends.cuda import support_checks

    support_checks.check_model(cfg)
    if cfg.batch_invariant and cfg.world > 1:
        raise StartupError(
            "--batch-invariant: NCCL's order of summation depends on the size of a launch; on cuda it takes "
            f"--tensor-parallel-size 1, not {cfg.world}"
        )
    device = support_checks.pick_device(cfg.card, cfg.cards, cfg.dtype) if cards is None else _card(cards, cfg)
    from trencadis.backends.cuda import support_checks
    from trencadis.backends.cuda.attention_libraries.ops_with_attention_library import RequestedAttention
    from trencadis.backends.cuda.backend import CudaBackend  # imports triton, which may be missing
    from trencadis.backends.cuda.kernels import tile_sizes
    from trencadis.backends.cuda.ops import CudaOps, InvariantCudaOps

    support_checks.require_exact_float32(cfg.dtype)
    runtime = runtime_of(device)
    comm = _comm(cfg, runtime)

    def reopen(cfg: BackendConfig) -> CudaBackend:
        support_checks.check_model(cfg)
        asked = RequestedAttention.of(cfg, tile_sizes.arch_of(device))
        ops = InvariantCudaOps() if cfg.batch_invariant else asked.ops(CudaOps)()
        return asked.attach(CudaBackend(cfg, runtime, ops, comm))

    note = support_checks.try_dependent_launch(runtime)
    made = _with_pipe(reopen(cfg))
    made.reopen = reopen
    made.notes += (note,) if note else ()
    return made


def _card(cards: Accelerator, cfg: BackendConfig) -> torch.device:
    import torch

    return torch.device(cards.name, cfg.card)


def _is_twin(policy: str, environ: Mapping[str, str] | None = None) -> bool:
    return policy == "twin" or envs.get_bool("TRENCADIS_CUDA_TWIN", environ)


def _twin(cfg: BackendConfig) -> Backend:
    from trencadis.backends.cuda.attention_libraries.ops_with_attention_library import RequestedAttention
    from trencadis.backends.cuda.backend import CudaBackend
    from trencadis.backends.cuda.cpu_twin.ops import TwinOps
    from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
    from trencadis.backends.cuda.kernels import gpu_platform
    from trencadis.backends.cuda.weights.quantised_weight import NEWEST

    if cfg.batch_invariant:
        raise StartupError("--batch-invariant: the twin of a card does not promise it; --device cpu does")
    runtime = TwinRuntime(label=f"{gpu_platform.in_use().name} (twin)")
    comm = _comm(cfg, runtime)

    def reopen(cfg: BackendConfig) -> CudaBackend:
        asked = RequestedAttention.of(cfg, NEWEST)
        return asked.attach(CudaBackend(cfg, runtime, asked.ops(TwinOps)(runtime.accounted), comm))

    made = _with_pipe(reopen(cfg))
    made.reopen = reopen
    return made


def _with_pipe(backend: CudaBackend) -> CudaBackend:
    """Adds links to the other pipeline stages, if there are any."""
    from trencadis.backends.cuda.nccl_comm import CudaPipe

    if backend.cfg.stages > 1:
        backend.pipe = CudaPipe(backend.cfg, backend.device, backend.in_order)
    return backend


def runtime_of(device: torch.device) -> Runtime:
    """Returns a card's runtime; for the CPU, where Triton interprets the kernels, a twin that captures no graphs."""
    from trencadis.backends.cuda.kernels import gpu_platform

    cards = gpu_platform.in_use()
    if device.type == cards.name:
        from trencadis.backends.cuda.cuda_runtime import CudaRuntime

        return CudaRuntime(device, cards)
    from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime

    return TwinRuntime(graphs=False, interprets=True, label=f"{cards.name} (interpreted)")


def _comm(cfg: BackendConfig, runtime: Runtime) -> Comm | None:
    """Returns the communicator of several ranks; None for one rank."""
    if cfg.ranks == 1:
        return None
    from trencadis.backends.cuda.kernels.gpu_platform import in_use
    from trencadis.backends.cuda.nccl_comm import CudaComm
    from trencadis.core.executor.rendezvous import join_group

    cards = in_use()
    join_group(cfg, f"cpu:gloo,{cards.name}:{cards.collectives}" if runtime.device.type == cards.name else "gloo")
    return CudaComm(cfg, runtime)


def has_card() -> bool:
    """True if this machine has an NVIDIA card; loads no library."""
    return card_nodes()


def cards(policy: str, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Returns how many cards a process may use, and the same in words. Loads no library.

    None if the number is unknown, or for the CPU twin.

    Raises:
        StartupError: ``CUDA_VISIBLE_DEVICES`` cannot be read.
    """
    from trencadis.backends.cuda.visible_devices import VISIBLE, visible

    count, entries = count_cards(), visible(environ)
    if count is None or _is_twin(policy, environ):
        return None
    if entries is not None and len(entries) < count:
        return len(entries), f"{VISIBLE}={environ[VISIBLE]} shows {len(entries)}"
    return count, f"there {'is' if count == 1 else 'are'} {count} here"


def listing() -> list[str]:
    """Returns one line for each card of this machine."""
    from trencadis.backends.cuda import support_checks

    return support_checks.cards()


def usable() -> str:
    """Returns why no card of this machine can serve; an empty string if one can."""
    from trencadis.backends.cuda import support_checks

    return support_checks.unusable_reason()


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype that a card computes in (``cuda_dtypes.pick_dtype``)."""
    from trencadis.backends.cuda import support_checks

    return support_checks.pick_dtype(asked, stored)
