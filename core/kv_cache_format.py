"""The KV cache's reserved blocks, and its 8-bit format: codes with a scale per token and head, and key values kept in
16 bits. Torch-free.

The largest values of a key come from its projection's bias, rotated by position: with a common scale they would leave
only a few codes for the other values of the head. So the rotary pairs with the largest bias stay in 16 bits, and their
codes are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

ZERO_BLOCK, SINK_BLOCK = 0, 1
"""KV blocks outside the pool: ZERO is read by padding and never written, SINK is written by padding and never read."""

RESERVED_BLOCKS = 2

KEPT_PAIRS = 4
"""Number of rotary pairs of a KV head that stay in 16 bits if keys have a bias."""

SCALE_BYTES, KEPT_BYTES, INDEX_BYTES, STATIC_BYTES = 2, 2, 4, 8
"""Bytes of a scale, of a kept value, of its index in the head, and of a layer's two static scales."""

INT8, FP8 = "int8", "fp8"
TOPS = {INT8: 127.0, FP8: 240.0}
"""Largest code. On Gaudi 2 e4m3 ends at 240 (elsewhere at 448); a common range gives the same codes on every device."""

LEAST_SCALES = {INT8: 2.0**-20, FP8: 2.0**-14}
"""Smallest scale. Codes of fp8 have an exponent of their own, so their scales need not be subnormal in float16."""

CHECKPOINT_TOPS = {INT8: 127.0, FP8: 448.0}
"""The largest code for which a checkpoint's scales are made."""

NAMES = {
    INT8: INT8, "int8_per_token_head": INT8, FP8: FP8, "fp8_e4m3": FP8, "fp8_per_token_head": FP8, "fp8_e5m2": FP8,
    "fp8_inc": FP8,
}  # fmt: skip
"""``--kv-cache-dtype`` -> codes."""

LINES = {
    "fp8_e5m2": "codes are e4m3, which with a scale a token and head is closer than e5m2",
    "fp8_inc": "scales are found as tokens are stored; no file of measurements is read",
}
"""Notes on names that mean something else in other servers."""


@dataclass(frozen=True)
class KVFormat:
    """The format of keys and values in a KV cache.

    Args:
        name: ``int8`` or ``fp8``.
        kept: number of values of a key that stay in 16 bits, two per rotary pair.
        static: use the checkpoint's scales, one for the keys and one for the values of a layer.
        requested: the name that the user gave.
    """

    name: str
    kept: int = 0
    static: bool = False
    requested: str = ""

    def head_bytes(self, head_dim: int) -> int:
        """Returns the bytes of K and V of one token and KV head."""
        return 2 * (head_dim + SCALE_BYTES) + self.kept * KEPT_BYTES

    def fixed_bytes(self, kv_heads: int) -> int:
        """Returns the bytes of a layer besides its cache: indices of kept values, and static scales."""
        return kv_heads * self.kept * INDEX_BYTES + (STATIC_BYTES if self.static else 0)


def parse_kv_format(asked: str, head_dim: int, bias: bool, static: bool = False) -> KVFormat | None:
    """Returns the format for a value of ``--kv-cache-dtype``; None: the engine's dtype.

    Args:
        bias: True if keys have a bias.
        static: ``--kv-cache-scales checkpoint``.
    """
    name = NAMES.get(asked)
    kept = 2 * min(KEPT_PAIRS, head_dim // 2) if bias else 0
    return None if name is None else KVFormat(name, kept, static, asked)


def head_bytes(form: KVFormat | None, head_dim: int, itemsize: int) -> int:
    """Returns the bytes of K and V of one token and KV head; ``itemsize``: bytes of the engine's dtype."""
    return 2 * head_dim * itemsize if form is None else form.head_bytes(head_dim)


def kv_notes(form: KVFormat | None) -> list[str]:
    """Returns lines about the cache for users."""
    if form is None:
        return []
    scales = "the checkpoint's scales" if form.static else "a scale a token and head"
    kept = f"; {form.kept} values of a key stay in 16 bits" if form.kept else ""
    lines = [f"KV cache: {form.name} with {scales}{kept}"]
    if form.requested in LINES:
        lines.append(f"--kv-cache-dtype {form.requested}: {LINES[form.requested]}")
    return lines
