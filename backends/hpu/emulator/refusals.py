"""What the emulated device refuses, each with the operation's name and the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

OURS = str(Path(__file__).parent)


class Refused(RuntimeError):
    """An operation that a device program must not do.

    Args:
        op: the operation's name.
        why: what is wrong with it on the device.
        remedy: what to do instead.
    """

    def __init__(self, op: str, why: str, remedy: str) -> None:
        super().__init__(f"{op}: {why}; {remedy}")
        self.op, self.why, self.remedy = op, why, remedy


class EmulatedOutOfMemory(RuntimeError):
    """The emulated device has no room left."""

    def __init__(self, wanted: int, free: int, what: str) -> None:
        super().__init__(f"hpu (emulated): out of memory: {what} needs {wanted} bytes and {free} are free")
        self.wanted, self.free = wanted, free


def line_of_code() -> str:
    """File and line that called the operation: the innermost frame outside torch and the emulator."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((OURS, "<")) and "/torch/" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def fallback_in_capture(op: str, why: str) -> Refused:
    return Refused(
        op, f"runs on the host's CPU ({why}) inside a capture, at {line_of_code()}", "use an operation of the list"
    )


def host_read(op: str) -> Refused:
    return Refused(op, "reads a device value on the host", "keep it in a tensor, or use .cpu() between launches")


def host_read_inside(op: str) -> Refused:
    return Refused(op, "copies to the host inside a launch", "end the launch first; outputs are fetched after it")


def host_mixed(op: str) -> Refused:
    return Refused(op, "mixes a host tensor with device tensors", "make it an input of the program, or copy it before")


def host_values(op: str) -> Refused:
    return Refused(
        op,
        "builds a device tensor from host values inside a body",
        "a graph would repeat today's values: pass it as an input",
    )


def dynamic_shape(op: str) -> Refused:
    return Refused(op, "has a shape that depends on values", "use torch.where, a finite mask or indices from the host")


def boolean_mask(op: str) -> Refused:
    return Refused(op, "indexes by a boolean mask", "use torch.where, or integer indices made on the host")


def view_update(op: str) -> Refused:
    return Refused(
        op, "updates a view inside a capture", "update the base tensor: index_copy_ or index_put_, or torch.cat"
    )


def too_many_ops(count: int, limit: int) -> Refused:
    return Refused("cut", f"{count} operations without a graph cut (limit {limit})", 'call ops.cut("layer") more often')


def resized(op: str) -> Refused:
    return Refused(op, "makes a tensor of another size outside a launch", "make it on the host and copy it with .to()")


def no_values(op: str) -> Refused:
    return Refused(op, "uses a result of a compile-only launch, which has no values", "run the program outside warm-up")


def negative_index(op: str) -> Refused:
    return Refused(op, "an index is outside its tensor (-1 included)", "padding must point at a reserved row or block")
