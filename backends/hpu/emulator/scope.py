"""The scope of a launch: while Python runs a body, every operation in it is seen, on host tensors too."""

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
    """One launch: the recipe being collected, the memory it takes, and the recording where it is captured.

    Args:
        recording: where a capture is recorded; None: an ordinary run.
        on_meta: run on tensors without values (captures, and everything in compile-only mode).
    """

    def __init__(self, device: LaunchHost, recording: CaptureRecording | None, on_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.recording, self.on_meta = device, recording, on_meta
        self.live = LiveBytes()
        self.collective = 0
        """Bytes that collectives left in place: a graph keeps them even where it keeps no other tensor."""
        self.ops = 0
        self.compiled = 0
        self.silent = False
        """Inside a compiled graph, whose recipes are counted when it is compiled."""
        self.region = False
        """Inside what would be a compiled graph, on a card without values."""
        self.layer_reuse = LayerReuse()
        self._recipe: list[Hashable] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True: torch before 2.10 compiles nothing while a user's dispatch mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.dispatch(func, args, kwargs or {})

    def add(self, name: str, args: Any, kwargs: Any) -> None:
        """One more operation of the recipe: its name, the shapes of its tensors, the values of everything else.

        In compile mode an operation outside a compiled graph is a recipe of its own.
        """
        if self.silent:
            self.ops += 1
            return
        self.collect((name, *(leaf_key(leaf) for leaf in flatten((args, kwargs)))))
        if not self.device.lazy and self.device.computes:
            self._end()

    def collect(self, row: Hashable) -> None:
        """``add`` with the operation's row of the recipe."""
        self.layer_reuse.note(row)
        self._recipe.append(row)
        self.ops += 1
        limit = self.device.profile.max_ops
        if len(self._recipe) > limit:
            raise refusals.too_many_ops(len(self._recipe), limit)

    def cut(self) -> None:
        """``mark_step``: what is alive now goes from one recipe to the next."""
        self.layer_reuse.cut(self.live.fresh)
        self.live.cut()
        self._end()

    def _end(self) -> None:
        """Ends a recipe; one that was never seen before is compiled."""
        if self._recipe:
            self.compiled += self.device.clock.run_recipe(tuple(self._recipe), len(self._recipe))
            self._recipe = []

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self.device.scope = None
        if exc_type is None:
            self._end()
            self.device.allocator.grow_workspace(self.live.peak)
