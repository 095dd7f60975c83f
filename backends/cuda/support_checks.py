"""Checks a machine and a model before anything is loaded; each error names the limit and what would work.

The dtype that an NVIDIA card computes in.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trencadis.backends.cuda.kernels import attention_metadata
from trencadis.backends.cuda.launches.bucket_capacity import PROCESSORS, block_tokens, item_capacity
from trencadis.backends.cuda.visible_devices import card_nodes
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError

if TYPE_CHECKING:
    from trencadis.backends.cuda.runtime_protocol import Runtime

ALIASES = {"float": "float32", "half": "float16"}
TAKEN = ("bfloat16", "float16", "float32")


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype for ``asked`` (``--dtype``): ``auto`` is the stored dtype if it has 16 bits, else bfloat16.

    Raises StartupError for a dtype that the kernels do not support.
    """
    name = ALIASES.get(asked, asked)
    if asked == "auto":
        name = stored if stored in ("bfloat16", "float16") else "bfloat16"
    if name not in TAKEN:
        raise StartupError(f"--dtype {asked} is not supported on cuda; use {', '.join(TAKEN[:-1])} or {TAKEN[-1]}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def require_exact_float32(dtype: torch.dtype) -> None:
    """Makes torch compute float32 products in float32, if that is the engine's ``dtype``.

    Otherwise torch would use TF32 where the process or the environment requests it, as NVIDIA's containers do.
    """
    if dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")


LEAST_TRITON = 3, 6
LEAST_CARD = 8, 0
WIDEST_VOCABULARY = 1 << 20
"""Size of the largest vocabulary that one program can summarise (``kernels/sample.py``)."""


ELSE = "--device cpu runs anywhere"


def pick_device(index: int, world: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.device:
    """Returns card ``index`` of this machine, after checking that Triton and the card support ``dtype`` on ``world``
    ranks.

    Raises:
        StartupError: a check failed.
    """
    if why := _absence_reason():
        raise StartupError(f"--device cuda: no NVIDIA card can be used: {why}; {ELSE}")
    _check_triton()
    count = torch.cuda.device_count()
    if world > count:
        raise StartupError(f"--tensor-parallel-size {world} needs {world} cards and there are {count}")
    if not 0 <= index < count:
        raise StartupError(f"--device cuda:{index}: there is no such card, there are {count}, from 0 on")
    found, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    if found < LEAST_CARD:
        raise StartupError(
            f"{name} has compute capability {found[0]}.{found[1]}; the cuda kernels need "
            f"{LEAST_CARD[0]}.{LEAST_CARD[1]} (Ampere) or newer; {ELSE}"
        )
    if dtype not in CARD_DTYPES:
        raise StartupError(f"{name} does not compute in {_short(dtype)}; use --dtype bfloat16, float16 or float32")
    return torch.device("cuda", index)


CARD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that every card from ``LEAST_CARD`` on supports."""


def unusable_reason() -> str:
    """Returns why card 0 cannot serve; an empty string if it can."""
    try:
        pick_device(0)
    except StartupError as error:
        return str(error).removesuffix(f"; {ELSE}").removeprefix("--device cuda: ")
    return ""


def cards() -> list[str]:
    """Returns one line per card: index, name, compute capability, memory, and whether it can serve."""
    if _absence_reason():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        old = (p.major, p.minor) < LEAST_CARD
        note = ", too old" if old else ""
        found.append(
            f"cuda:{i}  {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB{note}"
        )
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _absence_reason() -> str:
    """Returns why torch sees no card, with the remedy; an empty string if it sees one."""
    if torch.version.cuda is None:
        if card_nodes():
            return "there is one, but this build of torch has no CUDA; install a CUDA build (https://pytorch.org)"
        return "there is none, and this build of torch has no CUDA"
    if torch.cuda.is_available():
        return "" if torch.cuda.device_count() else "CUDA_VISIBLE_DEVICES hides them all"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "" if not card_nodes() else "; install or update the NVIDIA driver"
        return f"{said.rstrip('.')}{remedy}"
    return "its driver reports none"


def _check_triton() -> None:
    try:
        found = version("triton")
    except PackageNotFoundError:
        raise StartupError("--device cuda needs Triton: pip install 'trencadis[cuda]'") from None
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        raise StartupError(f"triton {found} is too old for --device cuda: {least} or newer (pip install -U triton)")
    if why := _no_compiler_reason():
        raise StartupError(
            f"--device cuda: Triton compiles what starts its kernels and {why}; install a C compiler and Python's "
            f"headers (apt install gcc python3-dev); {ELSE}"
        )


def _no_compiler_reason() -> str:
    """Returns why Triton cannot build its launchers; an empty string if it can, or if an earlier start has built
    some.
    """
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if any(cache.glob("*/cuda_utils*.so")):
        return ""
    if not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        return "there is no C compiler"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.is_file() else f"there is no {header}"


def try_dependent_launch(runtime: Runtime) -> str:
    """Tries a dependent launch, by itself and in a graph, where kernels would use them.

    If the driver refuses it they are turned off, and the note for the start is returned; else an empty string.
    """
    from trencadis.backends.cuda.kernels.layers import dependent_launch

    if not dependent_launch.possible(runtime.device):
        return ""
    out = torch.zeros(1, dtype=torch.int32, device=runtime.device)

    def body(inputs: object) -> None:
        dependent_launch.probe(out)

    def attempt() -> None:
        runtime.launch(PROBE, body, None, out)
        runtime.synchronize()
        runtime.release(runtime.capture(PROBE, PROBE, body, None, out))

    try:
        runtime.on_captures(attempt)
    except RuntimeError as error:
        dependent_launch.refuse()
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return f"the driver refuses dependent launches ({reason}): kernels of small launches start one after another"
    return ""


PROBE = "dependent launch"


def check_model(cfg: BackendConfig) -> None:
    """Checks head sizes, groups, block size, dtype and vocabulary of a model, as far as they are known.

    Raises:
        StartupError: no kernel supports one of them.
    """
    for kv_heads, head_dim in cfg.head_forms if cfg.head_dim else ():
        attention_metadata.check_supported(head_dim, cfg.heads // max(kv_heads, 1), cfg.block_size, cfg.dtype)
    if cfg.vision_head_dim:
        attention_metadata.check_supported(
            cfg.vision_head_dim, 1, cfg.block_size, cfg.dtype, attention_metadata.VISION_HEADS
        )
    _check_grid(cfg)
    if cfg.vocab_size > WIDEST_VOCABULARY:
        raise StartupError(
            f"a vocabulary of {cfg.vocab_size}: the cuda kernels take {WIDEST_VOCABULARY}; --device cpu takes any"
        )


MOST_ITEMS = 65_535
"""Maximum programs along the second axis of a grid (CUDA C++ Programming Guide, "Technical Specifications")."""


def _check_grid(cfg: BackendConfig) -> None:
    """Raises StartupError if the work items of the largest launch exceed the second axis of a grid."""
    longest, kv_heads = cfg.max_blocks_per_row * cfg.block_size, cfg.head_forms[0][0]
    group = max(max(cfg.heads // max(heads, 1), 1) for heads, _ in cfg.head_forms)
    largest = Bucket(Stage.PREFILL, (cfg.max_tokens, cfg.max_rows))
    count = item_capacity(largest, group, PROCESSORS, kv_heads, longest, cfg.batch_invariant).items
    if count > MOST_ITEMS:
        each = block_tokens(largest, group, cfg.batch_invariant)
        most = cfg.max_tokens - each * (count - MOST_ITEMS)
        raise StartupError(
            f"--max-num-batched-tokens {cfg.max_tokens}: attention would take {count} programs along an axis that has "
            f"{MOST_ITEMS}; {most // 1000 * 1000} tokens are few enough"
        )
