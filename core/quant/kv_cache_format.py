"""The form of an 8-bit KV cache: codes with a scale a token and head, and what of a key stays in 16 bits. Torch-free.

The largest values of a key are its projection's bias rotated by its position: under one scale they would leave the
other values of the head a few codes. So the rotary pairs of largest bias stay in 16 bits, and their codes are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT_PAIRS = 4
"""Rotary pairs of a KV head that stay in 16 bits, where keys have a bias."""

SCALE_BYTES, KEPT_BYTES, INDEX_BYTES, STATIC_BYTES = 2, 2, 4, 8
"""A scale; a value kept beside the codes; where in its head that is; a layer's two static scales."""

INT8, FP8 = "int8", "fp8"
TOPS = {INT8: 127.0, FP8: 240.0}
"""Largest code. Gaudi 2 holds e4m3 to 240 (others to 448): one range gives every device the same codes."""

LEAST_SCALES = {INT8: 2.0**-20, FP8: 2.0**-14}
"""Least scale: codes of fp8 have an exponent of their own, so that theirs need not be subnormal in float16."""

CHECKPOINT_TOPS = {INT8: 127.0, FP8: 448.0}
"""The code that a checkpoint's scale is made for."""

NAMES = {
    INT8: INT8, "int8_per_token_head": INT8, FP8: FP8, "fp8_e4m3": FP8, "fp8_per_token_head": FP8, "fp8_e5m2": FP8,
    "fp8_inc": FP8,
}  # fmt: skip
"""``--kv-cache-dtype`` -> codes."""

LINES = {
    "fp8_e5m2": "codes are e4m3, which with a scale a token and head is closer than e5m2",
    "fp8_inc": "scales are found as tokens are stored; no file of measurements is read",
}
"""What must be said of names that mean something else elsewhere."""


@dataclass(frozen=True)
class KVFormat:
    """How a KV cache holds keys and values.

    Args:
        name: ``int8`` or ``fp8``.
        kept: values of a key, two of each rotary pair, that stay in 16 bits.
        static: scales are the checkpoint's, one for the keys and one for the values of a layer.
        requested: the name that the user gave.
    """

    name: str
    kept: int = 0
    static: bool = False
    requested: str = ""

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of K and V of one token and KV head."""
        return 2 * (head_dim + SCALE_BYTES) + self.kept * KEPT_BYTES

    def fixed_bytes(self, kv_heads: int) -> int:
        """Bytes that a layer keeps beside its cache: which values are kept, and static scales."""
        return kv_heads * self.kept * INDEX_BYTES + (STATIC_BYTES if self.static else 0)


def parse_kv_format(asked: str, head_dim: int, bias: bool, static: bool = False) -> KVFormat | None:
    """The form that ``--kv-cache-dtype`` names; None: the engine's type.

    Args:
        bias: whether keys have one.
        static: ``--kv-cache-scales checkpoint``.
    """
    name = NAMES.get(asked)
    kept = 2 * min(KEPT_PAIRS, head_dim // 2) if bias else 0
    return None if name is None else KVFormat(name, kept, static, asked)


def head_bytes(form: KVFormat | None, head_dim: int, itemsize: int) -> int:
    """Bytes of K and V of one token and KV head; ``itemsize``: of the engine's type."""
    return 2 * head_dim * itemsize if form is None else form.head_bytes(head_dim)


def kv_notes(form: KVFormat | None) -> list[str]:
    """Lines about a cache for users."""
    if form is None:
        return []
    scales = "the checkpoint's scales" if form.static else "a scale a token and head"
    kept = f"; {form.kept} values of a key stay in 16 bits" if form.kept else ""
    lines = [f"KV cache: {form.name} with {scales}{kept}"]
    if form.requested in LINES:
        lines.append(f"--kv-cache-dtype {form.requested}: {LINES[form.requested]}")
    return lines
