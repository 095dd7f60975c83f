"""Integers of 4 and 8 bits in words of 32, the first in the lowest bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, dim: int, positions: Sequence[int] | None = None) -> Tensor:
    """The unsigned integers of int32 words [a, b], in uint8; ``dim`` grows 32 / bits times.

    Args:
        positions: the place in its word of each integer of a word's; None: 0, 1, 2 and so on.
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
    """The opposite of ``unpack_words``: int32 words of unsigned integers [a, b], zeros at the end of the last word."""
    each = 32 // bits
    values = values if dim == 1 else values.t()
    missing = -values.shape[1] % each
    wide = torch.nn.functional.pad(values.long(), (0, missing)).view(values.shape[0], -1, each)
    spots = torch.tensor(list(positions) if positions is not None else list(range(each)))
    words = (wide << (spots * bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return (words if dim == 1 else words.t()).contiguous()


def signed(codes: Tensor, bits: int) -> Tensor:
    """int8: unsigned codes less the middle of their range, as zero points are too."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
