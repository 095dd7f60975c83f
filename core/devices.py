"""Which backends there are, and their policies, without importing a device's library. Torch-free."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from trencadis.core.buckets import Policy
from trencadis.core.errors import StartupError

TABLE = {
    "cpu": "trencadis.backends.cpu",
    "cuda": "trencadis.backends.cuda",
    "hpu": "trencadis.backends.hpu",
}
BUILT = ("cpu", "cuda", "hpu")
"""Those that can serve."""


def policy_of(device: str, name: str = "") -> Policy:
    """The policy called ``name`` of a built-in device; what is planned without the device is planned from it.

    Raises:
        StartupError: no such device, or none whose shapes are known.
    """
    device = device.split(":")[0]
    if device not in TABLE:
        raise StartupError(f"--device {device} is none of {', '.join(TABLE)}.")
    module = f"{TABLE[device]}.policy"
    if find_spec(module) is None:
        raise StartupError(f"--device {device}: this backend has no policy yet; its shapes cannot be planned.")
    found: Policy = import_module(module).policy(name)
    return found
