"""The rows of a launch of recurrent layers, as the kernels take them: what all layers share is computed once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.device.launch_tensors import RecurrentRows

CHUNK = 64
"""Tokens of a row that are computed together."""


class ItemRows(NamedTuple):
    """``RecurrentRows`` of a ragged launch of n tokens, and its chunks: those of a row one after the other.

    A row's last token has no chunk if it would be alone in it.
    """

    slot: Tensor  # int64 [rows + 1]
    begins: Tensor  # int32 [rows + 1]
    source: Tensor  # int64 [rows + 1]
    count: Tensor  # type: ignore[assignment]  # int32 [rows + 1]
    row_start: Tensor  # int32 [rows + 2]
    token_row: Tensor  # int32 [n] row of each token
    row_chunk: Tensor  # int32 [rows + 1] first chunk of each row
    chunk_row: Tensor  # int32 [chunks] row of each chunk; -1: there is no such chunk


LaunchRows = RecurrentRows | ItemRows
"""``RecurrentRows``: each row has one token, row r token r."""


def item_rows(rows: RecurrentRows, row_start: Tensor, n: int) -> ItemRows:
    """Returns the chunks of a launch of n tokens, by operations of fixed shapes that a graph can capture."""
    owners = row_start[1:-1].contiguous()
    token = torch.arange(n, device=row_start.device, dtype=torch.int32)
    body = rows.count - (rows.count % CHUNK == 1).int()
    ends = ((body + CHUNK - 1) // CHUNK).cumsum(0).int()
    most = n // CHUNK + min(len(rows.count), n // 2)  # a row of chunks has two tokens at least
    number = torch.arange(most, device=row_start.device, dtype=torch.int32)
    chunk_row = torch.searchsorted(ends, number, right=True, out_int32=True)
    return ItemRows(
        *rows, row_start, torch.searchsorted(owners, token, right=True, out_int32=True),
        functional.pad(ends[:-1], (1, 0)), torch.where(number < ends[-1], chunk_row, -1),
    )  # fmt: skip
