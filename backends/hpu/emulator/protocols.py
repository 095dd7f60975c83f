"""What the parts of the emulator ask of each other, so that none imports the part that holds it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

from trencadis.backends.hpu.emulator.allocator import Allocator, LiveBytes
from trencadis.backends.hpu.emulator.card_profiles import Profile
from trencadis.backends.hpu.emulator.compile_clock import Clock


@runtime_checkable
class TensorOwner(Protocol):
    """The device, as its tensors see it."""

    computes: bool

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one ATen call."""
        ...


class LaunchHost(TensorOwner, Protocol):
    """The device, as a launch sees it."""

    lazy: bool
    profile: Profile
    clock: Clock
    allocator: Allocator
    scope: Any
    """The launch that is open; it writes None there when it ends."""


class RecordedValue(Protocol):
    """A value in the recording that made it."""

    @property
    def recording(self) -> Any: ...

    @property
    def index(self) -> int: ...


class RecipeScope(Protocol):
    """The open launch, as a repeated layer sees it."""

    live: LiveBytes
    collective: int

    def collect(self, row: Hashable) -> None:
        """Adds an operation's row to the recipe."""
        ...

    def cut(self) -> None:
        """Ends the recipe."""
        ...
