"""The emulated card of this process: torch's calls for its device type arrive here."""

from __future__ import annotations

from typing import Any

from torch.library import Library

from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice


class EmulatedRuntime:
    """The device on which new tensors are created; a process has one at a time."""

    device: EmulatedDevice | None = None
    library: Library | None = None


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    if EmulatedRuntime.device is None:
        raise RuntimeError("no emulated device is open")
    return EmulatedRuntime.device.dispatch(op, args, kwargs)


def use(device: EmulatedDevice) -> EmulatedDevice:
    """Makes ``device`` the process's card."""
    if EmulatedRuntime.library is None:
        EmulatedRuntime.library = Library("_", "IMPL")  # type: ignore[no-untyped-call]
        EmulatedRuntime.library.fallback(_fallback, "Lazy")  # type: ignore[no-untyped-call]
    EmulatedRuntime.device = device
    return device
