"""The tensors that describe a launch to the CUDA kernels. The bucket fixes the size of each.

Block tables are ragged: row r's blocks are ``blocks[block_start[r] : block_start[r + 1]]``, so that one copy of the ids
in use fills them, however long the longest possible row is.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ItemAttn(NamedTuple):
    """A ragged launch as work items (launches/work_items.py). The bucket's surplus tokens belong to row ``rows``.

    Item i: a block of queries from token ``item_token[i]`` of row ``item_row[i]`` on (-1: no item) attends to the keys
    ``item_begin[i] : item_stop[i]`` of that row as far as they are visible. Its result is partial result
    ``item_part[i]``, or the final one if that is -1. Join j: the results ``join_part[j] : join_part[j + 1]`` are joined
    to that of the block from token ``join_token[j]`` of row ``join_row[j]`` (-1: no join) on.
    """

    row_start: Tensor  # int32 [rows + 2]
    context: Tensor  # int32 [rows + 1]
    blocks: Tensor  # int32 [capacity]
    slot_map: Tensor  # int64 [tokens] block * block_size + offset
    block_start: Tensor  # int32 [rows + 2]
    item_row: Tensor  # int32 [items]
    item_token: Tensor  # int32 [items]
    item_begin: Tensor  # int32 [items]
    item_stop: Tensor  # int32 [items]
    item_part: Tensor  # int32 [items]
    join_row: Tensor  # int32 [joins]
    join_token: Tensor  # int32 [joins]
    join_part: Tensor  # int32 [joins + 1]
    upto: Tensor | None = None  # int32 [tokens] as in ``core.device.backend.Attn``


class SingleAttn(ItemAttn):
    """``ItemAttn`` of a launch with one token per row."""


class CrossAttentionItems(NamedTuple):
    """``core.device.launch_tensors.CrossAttentionTensors`` as work items (launches/cross_attention_items.py).

    Item i: the block of queries from token ``cross_token[i]`` of the launch on (-1: no item) attends to the images
    whose columns of ``reach`` are ``cross_unit[i] : cross_last[i]``, as far as each token sees them. Its result is
    final if ``cross_part[i]`` is -1. Else it is the partial result of that number, of one span, which begins with row
    ``cross_begin[i]`` of its only image. Join j: the results ``merge_part[j] : merge_part[j + 1]`` are joined to that
    of the block from token ``merge_token[j]`` on (-1: no join).
    """

    units: Tensor  # int32 [u]
    reach: Tensor  # int32 [tokens, u]
    times: Tensor  # int32 [tokens, u]
    gate: Tensor  # int32 [tokens]
    unit_row: Tensor  # int32 [u] the first arena row of each image
    cross_token: Tensor  # int32 [items]
    cross_unit: Tensor  # int32 [items]
    cross_last: Tensor  # int32 [items]
    cross_begin: Tensor  # int32 [items]
    cross_part: Tensor  # int32 [items]
    merge_token: Tensor  # int32 [joins]
    merge_part: Tensor  # int32 [joins + 1]


class SingleCrossAttention(CrossAttentionItems):
    """``CrossAttentionItems`` of a launch with one token per row."""


class CudaSegments(NamedTuple):
    """A packed VISION launch: ``core.device.backend.Segments`` and, per window, the windows [first, stop) of its image.

    ``order`` lists the windows, for each image those without padding first, at [first, whole) of the list.
    """

    segment: Tensor  # int32 [windows]
    real: Tensor  # int32 [windows]
    first: Tensor  # int32 [windows]
    stop: Tensor  # int32 [windows]
    whole: Tensor  # int32 [windows]
    order: Tensor  # int32 [windows]
    padding_window: Tensor | None = None  # int32 [windows] as in ``core.device.backend.Segments``
    solid: Tensor | None = None  # int32 [windows] ``real``, but 0 in padding windows; the two below follow from it
    solid_whole: Tensor | None = None
    solid_order: Tensor | None = None
