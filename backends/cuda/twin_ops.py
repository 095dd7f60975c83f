"""The reference ops over the CUDA backend's inputs, for the twin: no kernel, and nothing read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.cpu.reference import ReferenceOps
from trencadis.backends.cuda.twin import TwinMemory
from trencadis.core.backend import ZERO_BLOCK, Attn, LayerKV, Weight


class TwinOps(ReferenceOps):
    """``core.backend.Ops``; weights are booked, ragged block tables become the reference's rectangles."""

    def __init__(self, books: TwinMemory, row_blocks: int) -> None:
        self._books, self._row_blocks = books, row_blocks

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        self._books.take(weight.nbytes + (0 if bias is None else bias.nbytes))
        return super().pack_weight(weight, bias)

    def attend(self, q: Tensor, kv: LayerKV, attn: Attn, scale: float) -> Tensor:
        width = min(self._row_blocks, kv.k.shape[0])
        blocks = rectangle(attn.blocks, attn.block_start, width)  # type: ignore[attr-defined]
        return super().attend(q, kv, Attn(attn.row_start, attn.context, blocks, attn.slot_map), scale)


def rectangle(blocks: Tensor, start: Tensor, width: int) -> Tensor:
    """[rows + 1, width]: row r's are ``blocks[start[r] : start[r + 1]]``, then ZERO."""
    index = start[:-1, None] + torch.arange(width, dtype=start.dtype)
    table = blocks[index.clamp(max=blocks.shape[0] - 1).long()]
    return torch.where(index < start[1:, None], table, ZERO_BLOCK)
