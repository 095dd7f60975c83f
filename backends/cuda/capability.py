"""What a machine and a model must have before anything is loaded; each error names the limit and what would work."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from trencadis.backends.cuda.kernels import checks
from trencadis.core.backend import BackendConfig
from trencadis.core.errors import StartupError

LEAST_TRITON = 3, 6
LEAST_CARD = 8, 0
WIDEST_VOCABULARY = 1 << 20
"""Ids of the largest vocabulary that one program summarises (``kernels/head.py``)."""


def pick_device(index: int) -> torch.device:
    """Card ``index`` of this machine, once Triton and the card are known to serve.

    Raises:
        StartupError: they do not.
    """
    _check_triton()
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "its driver reports none"
        raise StartupError(f"--device cuda: no NVIDIA card can be used here ({why}); --device cpu runs anywhere")
    count = torch.cuda.device_count()
    if index >= count:
        raise StartupError(f"--device cuda: card {index} is asked for and there are {count}, from 0")
    found = torch.cuda.get_device_capability(index)
    if found < LEAST_CARD:
        raise StartupError(
            f"{torch.cuda.get_device_name(index)} has compute capability {found[0]}.{found[1]}; the cuda kernels need "
            f"{LEAST_CARD[0]}.{LEAST_CARD[1]} (Ampere) or newer; --device cpu runs anywhere"
        )
    return torch.device("cuda", index)


def _check_triton() -> None:
    try:
        found = version("triton")
    except PackageNotFoundError:
        raise StartupError("--device cuda needs Triton: pip install 'trencadis[cuda]'") from None
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        raise StartupError(f"triton {found} is too old for --device cuda: {least} or newer (pip install -U triton)")


def check_model(cfg: BackendConfig) -> None:
    """Head sizes, groups, block size, dtype and vocabulary of a model, as far as they are known.

    Raises:
        StartupError: one that no kernel takes.
    """
    if cfg.world != 1:
        raise StartupError(f"the cuda backend runs one rank, not {cfg.world}; --tensor-parallel-size 1")
    if cfg.head_dim:
        checks.supported(cfg.head_dim, cfg.heads // max(cfg.kv_heads, 1), cfg.block_size, cfg.dtype)
    if cfg.vision_head_dim:
        checks.supported(cfg.vision_head_dim, 1, cfg.block_size, cfg.dtype)
    if cfg.vocab_size > WIDEST_VOCABULARY:
        raise StartupError(
            f"a vocabulary of {cfg.vocab_size}: the cuda kernels take {WIDEST_VOCABULARY}; --device cpu takes any"
        )
