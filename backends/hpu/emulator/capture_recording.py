"""The operations of a captured launch, in order, with the tensors that they ran on. Replay runs them, not Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator import refusals
from trencadis.backends.hpu.emulator.device_tensor import DeviceTensor, flatten, rebuild

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSlot:
    """A value that the recording makes."""

    recording: CaptureRecording
    index: int


@dataclass(slots=True)
class RecordedCall:
    """One operation: ``args`` and ``kwargs`` hold RecordedSlots, outside tensors and constants; ``made`` its outputs.

    ``line``: the line of code that called it.
    """

    function: Function
    args: Any
    kwargs: Any
    made: list[int | None]
    line: str
    last: list[int] = field(default_factory=list)  # slots that nothing reads after this call


class CaptureRecording:
    """A captured launch."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.count = 0
        self.outputs: list[tuple[DeviceTensor, int]] = []

    def __len__(self) -> int:
        return len(self.calls)

    def record(self, function: Function, args: Any, kwargs: Any, out: Any) -> None:
        """Adds a call.

        Device tensors made before in this recording become slots; others keep their place on the device.
        """
        line = refusals.line_of_code()
        call = RecordedCall(function, rebuild(args, self._reference), rebuild(kwargs, self._reference), [], line)
        known = {id(leaf) for leaf in flatten((args, kwargs))}
        for leaf in flatten(out):
            if not isinstance(leaf, DeviceTensor) or id(leaf) in known:
                call.made.append(None)
                continue
            leaf.slot = RecordedSlot(self, self.count)
            call.made.append(self.count)
            self.count += 1
        self.calls.append(call)

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, DeviceTensor):
            return leaf
        if leaf.slot is not None and leaf.slot.recording is self:
            return leaf.slot
        if leaf.owner.computes and leaf.held.is_meta:
            raise refusals.no_values("capture")
        leaf.store.captured = True
        return leaf.held

    def finish(self, outputs: list[DeviceTensor]) -> int:
        """Fixes the outputs, which get storages of their own; returns their bytes."""
        total = 0
        for tensor in outputs:
            if tensor.slot is None or tensor.slot.recording is not self:
                continue
            if tensor.owner.computes:
                tensor.held = torch.zeros(tensor.shape, dtype=tensor.dtype)
            self.outputs.append((tensor, tensor.slot.index))
            total += tensor.numel() * tensor.dtype.itemsize
            tensor.store.keep()
        kept = {index for _, index in self.outputs}
        seen: set[int] = set()
        for call in reversed(self.calls):
            read = {leaf.index for leaf in flatten((call.args, call.kwargs)) if isinstance(leaf, RecordedSlot)}
            made = {index for index in call.made if index is not None}
            call.last = sorted((read | made) - seen - kept)
            seen |= read | made
        return total

    def replay(self) -> None:
        """Runs the calls on the current contents of the outside tensors; outputs are overwritten in place."""
        values: list[Tensor | None] = [None] * self.count

        def value(leaf: Any) -> Any:
            return values[leaf.index] if isinstance(leaf, RecordedSlot) else leaf

        for call in self.calls:
            try:
                out = flatten(call.function(*rebuild(call.args, value), **rebuild(call.kwargs, value)))
            except refusals.Refused as refused:
                raise refused.at(call.line) from None
            for index, made in zip(call.made, out, strict=True):
                if index is not None:
                    values[index] = made
            for index in call.last:
                values[index] = None
        for tensor, index in self.outputs:
            made_now = values[index]
            assert made_now is not None
            tensor.held.copy_(made_now)
