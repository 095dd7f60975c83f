"""The library's structures as ctypes declarations, and the check that both sides have the same field offsets."""

from __future__ import annotations

import ctypes
from typing import Any


class Layout(ctypes.Structure):
    """``PanelWeight`` of panels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "factor", "gather", "bias", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "columns", "group", "bits", "middle")),
    ]


class DenseLayout(ctypes.Structure):
    """``Dense`` of dense.h, of which a call changes all from ``x`` to ``scale`` and the kind of kernels."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "depth", "outputs", "type")),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("n", "stride", "parts")),
        ("scale", ctypes.c_float),
        ("pairs", ctypes.c_int),
        ("kind", ctypes.c_int64),
    ]


class PackCall(ctypes.Structure):
    """``Pack`` of dense.h; a call sets the kind of kernels."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "out")),
        *((name, ctypes.c_int64) for name in ("inputs", "depth", "source", "target", "kind")),
    ]


class AttendLayout(ctypes.Structure):
    """``Attend`` of panels.h; the library fills in the last two."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "k", "v", "k_scale", "v_scale", "kept", "pairs")),
        *((name, ctypes.c_void_p) for name in ("blocks", "token", "row", "first", "length", "sinks")),
        *(
            (name, ctypes.c_int64)
            for name in ("n", "heads", "groups", "size", "block", "width", "stride", "kept_count")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("type", "codes", "kept_type", "bfloat16_pairs")),
        ("starts", ctypes.c_void_p),
        ("part", ctypes.c_void_p),
    ]


class RotaryLayout(ctypes.Structure):
    """``Rotary`` of panels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "out", "keys", "values", "slot")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "size", "type")),
    ]


class FlashLayout(ctypes.Structure):
    """``Flash`` of flash.h; the library fills in the last four."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "sinks")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "size", "window")),
        ("spans", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "type")),
        ("scale", ctypes.c_float),
        ("pairs", ctypes.c_int),
        ("starts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "next", "team")),
    ]


class SpanLayout(ctypes.Structure):
    """``Span`` of flash.h, a row of ten int64 in an array."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("first", "count", "query_at", "slot", "keys", "slots", "place", "own")),
        *((name, ctypes.c_int64) for name in ("upto", "whole")),
    ]


ROWS = ("slot", "source", "begins", "start", "count")
"""Pointers of ``StateRows`` of recurrent.h, which lie inside the structures below and are followed by its ``n``."""


class ConvolutionLayout(ctypes.Structure):
    """``Convolution`` of recurrent.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "state", "out")),
        *((name, ctypes.c_void_p) for name in ROWS),
        *((name, ctypes.c_int64) for name in ("rows", "channels", "taps", "stride", "type", "silu")),
    ]


class DeltaLayout(ctypes.Structure):
    """``Delta`` of recurrent.h; the library fills in the last two."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "g", "beta", "state", "out")),
        *((name, ctypes.c_void_p) for name in ROWS),
        *((name, ctypes.c_int64) for name in ("rows", "q_row", "k_row", "v_row", "gate_row", "beta_row")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "dk", "dv", "type", "plain")),
        ("work", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    ]


class DeltaNetLayout(ctypes.Structure):
    """``DeltaNet`` of recurrent.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gates", "weight", "last", "decay", "shift", "norm", "state")),
        *((name, ctypes.c_void_p) for name in ("mixed", "y", "factors", "out")),
        *((name, ctypes.c_void_p) for name in ROWS),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "x_row", "gates_row", "taps", "heads", "groups")),
        *((name, ctypes.c_int64) for name in ("dk", "dv", "type")),
        ("eps", ctypes.c_float),
    ]


class AdaptersLayout(ctypes.Structure):
    """``Adapters`` of adapters.h, of which a call sets all from ``x`` on."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "places")),
        *((name, ctypes.c_int64) for name in ("parts", "rank", "inputs", "blocks", "type")),
        *((name, ctypes.c_void_p) for name in ("x", "y", "runs")),
        *((name, ctypes.c_int64) for name in ("x_row", "y_row", "n", "count")),
        ("shrunk", ctypes.c_void_p),
    ]


class ReplayedCall(ctypes.Structure):
    """``ReplayedCall`` of replay.h."""

    _fields_ = [
        ("function", ctypes.c_int64),
        ("arguments", ctypes.c_int64 * 11),
        ("rows", ctypes.c_int64),
        ("real", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class AttendRowsLayout(ctypes.Structure):
    """``AttendRows`` of replay.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("blocks", "token", "row", "first", "length")),
        *((name, ctypes.c_int64) for name in ("n", "width")),
    ]


class ReplayedLaunchLayout(ctypes.Structure):
    """``ReplayedLaunch`` of replay.h."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("rows", "runs")), ("count", ctypes.c_int64)]


class ExpertsLayout(ctypes.Structure):
    """``Experts`` of experts.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("count", "top", "hidden", "inner", "type", "coded", "act", "normalise")),
    ]


STRUCTURES = (
    Layout, DenseLayout, PackCall, AttendLayout, RotaryLayout, FlashLayout, SpanLayout, ConvolutionLayout, DeltaLayout,
    DeltaNetLayout, AdaptersLayout, ReplayedCall, AttendRowsLayout, ReplayedLaunchLayout,
    ExpertsLayout,
)  # fmt: skip
"""The structures in the order of their numbers in layouts.c."""


def find_difference(library: Any) -> str:
    """Returns the name of the first structure that the library lays out differently from this module; "": none."""
    place = library.trencadis_layout
    place.restype, place.argtypes = ctypes.c_int64, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
    for number, layout in enumerate(STRUCTURES):
        names = [field[0] for field in layout._fields_]
        offsets = (ctypes.c_int64 * len(names))()
        if place(number, offsets, len(names)) != ctypes.sizeof(layout):
            return layout.__name__
        if list(offsets) != [getattr(layout, name).offset for name in names]:
            return layout.__name__
    return ""
