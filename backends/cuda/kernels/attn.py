"""The tensors that tell the CUDA kernels how a launch is laid out. The bucket fixes the size of each.

Block tables are ragged: row r's blocks are ``blocks[block_start[r] : block_start[r + 1]]``, so that one copy of the ids
in use fills them, however long the longest possible row is.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PrefillAttn(NamedTuple):
    """A ragged launch: rows of any number of tokens. Row ``rows`` owns the bucket's surplus tokens.

    ``work_row`` lists the rows by descending number of keys, the surplus row last; ``work_start`` counts the tokens
    before each of them in that order. Q-blocks are found from both on the device, so that the longest start first and
    the host need not know how many tokens a Q-block holds.
    """

    row_start: Tensor  # int32 [rows + 2]
    context: Tensor  # int32 [rows + 1]
    blocks: Tensor  # int32 [capacity]
    slot_map: Tensor  # int64 [tokens] block * block_size + offset
    block_start: Tensor  # int32 [rows + 2]
    work_row: Tensor  # int32 [rows + 1]
    work_start: Tensor  # int32 [rows + 1]
    upto: Tensor | None = None  # int32 [tokens] as in ``core.backend.Attn``


class SplitDecodeAttn(NamedTuple):
    """One token a row, its keys cut into pieces that are attended to in parallel and combined.

    The pieces of row r are ``row_split[r] : row_split[r + 1]``, none where the row is padding; piece s covers the keys
    ``split_start[s] : split_stop[s]`` of row ``split_row[s]`` and is empty where it is not used.
    """

    row_start: Tensor  # int32 [rows + 2]
    context: Tensor  # int32 [rows + 1]
    blocks: Tensor  # int32 [capacity]
    slot_map: Tensor  # int64 [rows]
    block_start: Tensor  # int32 [rows + 2]
    row_split: Tensor  # int32 [rows + 1]
    split_row: Tensor  # int32 [splits]
    split_start: Tensor  # int32 [splits]
    split_stop: Tensor  # int32 [splits]


class CudaSegments(NamedTuple):
    """A packed VISION launch: ``core.backend.Segments`` and, of each window, the windows [first, stop) of its image."""

    segment: Tensor  # int32 [windows]
    real: Tensor  # int32 [windows]
    first: Tensor  # int32 [windows]
    stop: Tensor  # int32 [windows]
