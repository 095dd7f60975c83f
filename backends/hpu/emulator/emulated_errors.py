"""Errors of the emulated device, each with the operation, the remedy and the line of code."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<frozen")
"""Path prefixes of files whose lines are skipped when the cause is searched: the emulator's and torch's."""


def line_of_code() -> str:
    """Returns ``file:line`` of the innermost frame that belongs to neither the emulator nor torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


class Refused(RuntimeError):
    """An operation that a device program must not do.

    Args:
        op: the operation's name.
        why: what is wrong with it on the device.
        remedy: what to do instead.
        line: the line of code; None: the line that runs now.
    """

    def __init__(self, op: str, why: str, remedy: str, line: str | None = None) -> None:
        self.op, self.why, self.remedy, self.line = op, why, remedy, line or line_of_code()
        super().__init__(f"{op}: {why}; {remedy} ({self.line})")

    def at(self, line: str) -> Refused:
        """Returns the same error with the line of code that was captured."""
        return Refused(self.op, self.why, self.remedy, line)


class EmulatedOutOfMemory(RuntimeError):
    """The emulated device has no memory left, or none in one piece (``largest``: bytes of the largest).

    The text is the plug-in's for the place: that of the workspace differs from that of tensors and graphs.
    """

    def __init__(
        self, wanted: int, free: int, what: str, largest: int | None = None, workspace: bool = False
    ) -> None:  # fmt: skip
        split = f", the largest piece of them {largest}" if largest is not None and wanted <= free else ""
        place = f"MODULE:PT_SYNHELPER workspace Allocation of size ::{wanted} failed!" if workspace else (
            f"MODULE:PT_DEVMEM Allocation failed for size::{wanted} ({wanted / (1 << 20):.6g})MB"
        )  # fmt: skip
        super().__init__(f"FATAL ERROR :: {place} (hpu, emulated: {what}; {free} are free{split})")
        self.wanted, self.free = wanted, free


def missing_type(dtype: torch.dtype) -> Refused:
    return Refused("a tensor", f"is {str(dtype).removeprefix('torch.')}, which the card has not", "use another type")


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


def new_version(op: str) -> Refused:
    return Refused(
        op,
        "writes to a view between launches, which makes another version of its tensor: graphs read the old one",
        "write the whole tensor, or let a launch do it: index_copy_ on the tensor itself",
    )


def too_many_ops(count: int, limit: int) -> Refused:
    return Refused("cut", f"{count} operations without a graph cut (limit {limit})", 'call ops.cut("layer") more often')


def resized_tensor(op: str) -> Refused:
    return Refused(op, "makes a tensor of another size outside a launch", "make it on the host and copy it with .to()")


def no_hccl_memory(op: str) -> Refused:
    return Refused(
        op, "finds no memory for HCCL's buffers: the pool has all of it", "name the ranks in WORLD_SIZE at opening"
    )


def no_values(op: str) -> Refused:
    return Refused(op, "uses a result of a compile-only launch, which has no values", "run the program outside warm-up")


def negative_index(op: str) -> Refused:
    return Refused(op, "an index is outside its tensor (-1 included)", "padding must point at a reserved row or block")


def mask_too_large(op: str, count: int) -> Refused:
    return Refused(op, f"a mask of {count} bytes a head makes NaN beyond 2^31", "attend to fewer queries at a time")


def causal_statistics(queries: int, keys: int, step: int) -> Refused:
    return Refused(
        "sdpa_recomp_fwd",
        f"a causal call of {queries} x {keys} gives wrong statistics",
        f"take multiples of {step}, or a mask",
    )


def too_wide(op: str, value: int) -> Refused:
    return Refused(
        op, f"makes the whole number {value}, of which the card keeps 32 bits", "keep values and indices below 2^31"
    )
