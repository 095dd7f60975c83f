"""The scope of a launch: while Python runs a body, it sees every operation, also on host tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.backends.hpu.emulator import refusals
from trencadis.backends.hpu.emulator.allocator import LiveBytes
from trencadis.backends.hpu.emulator.capture_recording import CaptureRecording
from trencadis.backends.hpu.emulator.device_tensor import flatten
from trencadis.backends.hpu.emulator.layer_reuse import LayerReuse, leaf_key
from trencadis.backends.hpu.emulator.protocols import LaunchHost


class Scope(TorchDispatchMode):
    """One launch: the recipe being collected, the memory it takes, and the recording if it is captured.

    Args:
        recording: the recording of a capture; None: an ordinary run.
        on_meta: True: run on tensors without values (captures, and everything in compile-only mode).
    """

    def __init__(self, device: LaunchHost, recording: CaptureRecording | None, on_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.recording, self.on_meta = device, recording, on_meta
        self.live = LiveBytes()
        self.collective = 0
        """Bytes of results of collectives: a graph keeps them even where it keeps no other tensor."""
        self.ops = 0
        self.compiled = 0
        self.silent = False
        """True inside a compiled graph, whose recipes are counted when it is compiled."""
        self.region = False
        """True inside a region that would be a compiled graph, on a card without values."""
        self.layer_reuse = LayerReuse()
        self._recipe: list[Hashable] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True: torch before 2.10 compiles nothing while a user's dispatch mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.dispatch(func, args, kwargs or {})

    def add(self, name: str, args: Any, kwargs: Any) -> None:
        """Adds an operation to the recipe: its name, the shapes of its tensors, the values of everything else.

        In compile mode an operation outside a compiled graph is a recipe of its own.
        """
        if self.silent:
            self.ops += 1
            return
        self.collect((name, *(leaf_key(leaf) for leaf in flatten((args, kwargs)))))
        if not self.device.lazy and self.device.computes:
            self._end()

    def collect(self, row: Hashable) -> None:
        """Adds an operation's row to the recipe; raises if the recipe has too many operations."""
        self.layer_reuse.note(row)
        self._recipe.append(row)
        self.ops += 1
        limit = self.device.profile.max_ops
        if len(self._recipe) > limit:
            raise refusals.too_many_ops(len(self._recipe), limit)

    def cut(self) -> None:
        """Ends the recipe at a ``mark_step``: tensors that are alive now pass from one recipe to the next."""
        self.layer_reuse.cut(self.live.fresh)
        self.live.cut()
        self._end()

    def _end(self) -> None:
        """Ends a recipe, which is compiled if it is new."""
        if self._recipe:
            self.compiled += self.device.clock.run_recipe(tuple(self._recipe), len(self._recipe))
            self._recipe = []

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self.device.scope = None
        if exc_type is None:
            self._end()
            self.device.allocator.grow_workspace(self.live.peak)
