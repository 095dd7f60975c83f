"""Packs integers of 4 and 8 bits into 32-bit words, the first integer in the lowest bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, dim: int, positions: Sequence[int] | None = None) -> Tensor:
    """Unpacks the unsigned integers of int32 words [a, b] to uint8; ``dim`` grows by a factor of 32 / bits.

    Args:
        positions: the position within the word of each integer; None: 0, 1, 2 and so on.
    """
    each = 32 // bits
    # A word's bytes are little-endian on every machine that torch runs on.
    view = words.flatten().contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 4:
        view = torch.stack([view & 15, view >> 4], -1).view(*words.shape, each)
    if positions is not None:
        view = view[..., list(positions)]
    if dim == 1:
        return view.reshape(words.shape[0], -1)
    return view.transpose(1, 2).reshape(-1, words.shape[1])


def pack_words(values: Tensor, bits: int, dim: int, positions: Sequence[int] | None = None) -> Tensor:
    """Packs unsigned integers [a, b] into int32 words, the inverse of ``unpack_words``.

    The last word is padded with zeros.
    """
    each = 32 // bits
    values = values if dim == 1 else values.t()
    missing = -values.shape[1] % each
    wide = torch.nn.functional.pad(values.long(), (0, missing)).view(values.shape[0], -1, each)
    spots = torch.tensor(list(positions) if positions is not None else list(range(each)))
    words = (wide << (spots * bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return (words if dim == 1 else words.t()).contiguous()


def signed(codes: Tensor, bits: int) -> Tensor:
    """Converts unsigned codes to int8 by subtracting the middle of their range, also used for zero points."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
