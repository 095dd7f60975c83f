"""As the plug-in, it reads its variables when it is imported, and checks the torch beside it."""

import os
from pathlib import Path

import habana_frameworks.autoload

habana_frameworks.autoload.is_loaded = True

import torch  # noqa: E402
from habana_frameworks.release import LAZY_BY_DEFAULT, TAKES_PLAIN_TORCH  # noqa: E402

AT_IMPORT = {n: v for n, v in os.environ.items() if n.startswith(("PT_HPU", "FUSER_"))}
AT_IMPORT.setdefault("PT_HPU_LAZY_MODE", "1" if LAZY_BY_DEFAULT else "0")
LAZY = AT_IMPORT["PT_HPU_LAZY_MODE"] != "0"

_required = Path(__file__).with_name("required_version.txt")
if _required.exists():
    _wanted, _have = _required.read_text().strip(), torch.__version__
    _base, _, _local = _have.partition("+")
    if not _local and not TAKES_PLAIN_TORCH:
        raise AttributeError("'NoneType' object has no attribute 'startswith'")
    is_torch_fork = _local.startswith(("git", "hpu"))
    if _wanted.split(".")[:2] != _base.split(".")[:2]:
        raise AssertionError(
            f"Error: Compile-time major/minor PyTorch version {_wanted} differs from run-time {_have}."
        )
    if LAZY and not is_torch_fork:
        raise AssertionError(f"Stock PyTorch version {_have} is not supported in Lazy mode.")
if os.environ.get("HABANA_STUB_BROKEN"):
    raise OSError(os.environ["HABANA_STUB_BROKEN"])
if os.environ.get("HABANA_STUB_DEVICE"):
    # The stub's tensors are the CPU's: torch knows the name of the device and has no kernels for it.
    import trencadis.backends.hpu.start.bridge_loader as _opening

    _opening.DEVICE = os.environ["HABANA_STUB_DEVICE"]
    from habana_frameworks.torch import float8_stores as _stores

    _stores.register()
