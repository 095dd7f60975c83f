"""FlashAttention over the paged cache: version 2 by ``flash_attn_varlen_func``, 3 by ``flash_attn_with_kvcache``.

Both take ragged queries and a rectangle of block ids, which is made on the device once per launch, within its graph.
Two rules determine its form. The longest query row and the longest key row are host numbers, so they are those of the
bucket. And if that is one query per row, version 2 reads row r of the launch as token r: a decoding launch has as many
rows as tokens, and rows of no sequence have no keys, for which both give 0.

Version 2 has ``flash_attn_with_kvcache`` too; it reads the longest row from the device, which no capture allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.attention_tensors import ItemAttn
from trencadis.backends.cuda.launches.cuda_inputs import Sizes
from trencadis.backends.cuda.libraries.library_launch import Array
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.device.backend import LayerKV
from trencadis.core.shared_constants import ZERO_BLOCK


class FlashAttnRows(NamedTuple):
    """Rows of a launch; the row of its surplus tokens, and rows of no sequence, have no keys."""

    starts: Tensor  # int32 [rows + 1] start of each row's queries
    keys: Tensor  # int32 [rows] number of keys that each row sees
    ends: Tensor  # int32 [rows + 1] the sums of keys before each row
    table: Tensor  # int32 [rows, blocks of the longest row]


def rows_of(attn: ItemAttn, columns: int, single: bool) -> FlashAttnRows:
    """Computes the rows on the device, by calls that a graph can hold.

    Args:
        columns: blocks of the longest possible row.
        single: True if every token is a row.
    """
    first = attn.row_start
    count = attn.context.shape[0] - single
    tokens = first[1 : count + 1] - first[:count]
    keys = attn.context[:count] + tokens
    if single:
        keys = torch.where(tokens > 0, keys, 0)
        starts = torch.arange(count + 1, dtype=torch.int32, device=first.device)
    else:
        keys[-1:].zero_()  # the row of the surplus tokens
        starts = first
    ends = torch.nn.functional.pad(torch.cumsum(keys, 0, dtype=torch.int32), (1, 0))
    begin = attn.block_start[: count + 1]
    index = begin[:-1, None] + torch.arange(columns, dtype=torch.int32, device=first.device)
    held = attn.blocks.index_select(0, index.clamp(max=attn.blocks.shape[0] - 1).flatten()).view(index.shape)
    table = torch.where(index < begin[1:, None], held, ZERO_BLOCK)
    return FlashAttnRows(starts, keys, ends, table)


class FlashAttnLaunch:
    """Implements ``LibraryLaunch`` by FlashAttention; ``third``: version 3."""

    plans = False

    def __init__(self, call: Callable[..., Any], third: bool, bucket: Bucket, sizes: Sizes) -> None:
        self._call, self._third, self._columns = call, third, sizes.row_blocks
        self._single = bucket.stage is Stage.DECODE
        self._queries = 1 if self._single else padded_tokens(bucket)
        self._keys = sizes.row_blocks * sizes.block_size
        self._rows: FlashAttnRows | None = None

    def plan(self, arrays: Mapping[str, Array]) -> None:
        """Does nothing: FlashAttention needs no plan."""

    def begin(self, attn: ItemAttn) -> None:
        self._rows = rows_of(attn, self._columns, self._single)

    def attend(self, q: Tensor, kv: LayerKV, scale: float, window: int) -> Tensor:
        rows = self._rows
        assert rows is not None, "a launch begins before its layers"
        shared: dict[str, Any] = {
            "softmax_scale": scale, "causal": True, "window_size": (window - 1, 0) if window else (-1, -1),
        }  # fmt: skip
        if self._third:
            out: Tensor = self._call(
                q, kv.k, kv.v, cache_seqlens=rows.keys, page_table=rows.table, cu_seqlens_q=rows.starts,
                max_seqlen_q=self._queries, **shared,
            )  # fmt: skip
            return out
        out = self._call(
            q, kv.k, kv.v, rows.starts, rows.ends, self._queries, self._keys, block_table=rows.table, **shared
        )
        return out
