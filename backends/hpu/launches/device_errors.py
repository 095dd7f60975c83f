"""Errors of the device, converted to those that the engine handles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trencadis.backends.hpu.bridge import Bridge
from trencadis.core.device.backend import OutOfDeviceMemory


@contextmanager
def named_errors(bridge: Bridge) -> Iterator[None]:
    """Converts errors of the device that mean a lack of memory to OutOfDeviceMemory."""
    try:
        yield
    except RuntimeError as error:
        if bridge.out_of_memory(error) and not isinstance(error, OutOfDeviceMemory):
            raise OutOfDeviceMemory(" ".join(str(error).split())) from error
        raise
