"""Protocols between the parts of the emulator, so that no part imports the one that contains it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

from trencadis.backends.hpu.emulator.allocator import Allocator, LiveBytes
from trencadis.backends.hpu.emulator.card_profiles import Profile
from trencadis.backends.hpu.emulator.compile_clock import Clock


@runtime_checkable
class TensorOwner(Protocol):
    """The part of the device that its tensors use."""

    computes: bool

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one ATen call."""
        ...


class LaunchHost(TensorOwner, Protocol):
    """The part of the device that a launch uses."""

    lazy: bool
    profile: Profile
    clock: Clock
    allocator: Allocator
    scope: Any
    """The launch that is open; the launch sets it to None when it ends."""


class RecordedValue(Protocol):
    """A value in the recording that made it."""

    @property
    def recording(self) -> Any: ...

    @property
    def index(self) -> int: ...


class RecipeScope(Protocol):
    """The part of the open launch that a repeated layer uses."""

    live: LiveBytes
    collective: int

    def collect(self, row: Hashable) -> None:
        """Adds an operation's row to the recipe."""
        ...

    def cut(self) -> None:
        """Ends the recipe."""
        ...
