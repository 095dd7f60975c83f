"""The scope of a launch: while Python runs a body, every operation in it is seen, on host tensors too."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.backends.hpu.emulator import refusals
from trencadis.backends.hpu.emulator.allocator import Live
from trencadis.backends.hpu.emulator.tape import Tape
from trencadis.backends.hpu.emulator.tensor import flatten

if TYPE_CHECKING:
    from trencadis.backends.hpu.emulator.device import Device


class Scope(TorchDispatchMode):
    """One launch: the recipe being collected, the memory it takes, and the tape where it is captured.

    Args:
        tape: where a capture is recorded; None: an ordinary run.
        shadow: run on tensors without values (captures, and everything in compile-only mode).
    """

    def __init__(self, device: Device, tape: Tape | None, shadow: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.tape, self.shadow = device, tape, shadow
        self.live = Live()
        self.ops = 0
        self.compiled = 0
        self._recipe: list[Hashable] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.dispatch(func, args, kwargs or {})

    def add(self, name: str, args: Any, kwargs: Any) -> None:
        """One more operation of the recipe: its name, the shapes of its tensors, the values of everything else."""
        self._recipe.append((name, *(_key(leaf) for leaf in flatten((args, kwargs)))))
        self.ops += 1
        limit = self.device.profile.max_ops
        if len(self._recipe) > limit:
            raise refusals.too_many_ops(len(self._recipe), limit)

    def cut(self) -> None:
        """Ends a recipe; one that was never seen before is compiled."""
        if self._recipe:
            self.compiled += self.device.clock.recipe(tuple(self._recipe), len(self._recipe))
            self._recipe = []

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self.device.scope = None
        if exc_type is None:
            self.cut()
            self.device.allocator.grow_workspace(self.live.peak)


def _key(leaf: Any) -> Hashable:
    """Strides are left out: torch's meta kernels lay some results out otherwise than the CPU's."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, int | float | bool | str | torch.dtype) or leaf is None else str(leaf)
