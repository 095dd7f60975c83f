"""The tensors that describe a launch to the CUDA kernels, and checks of the attention kernels' arguments.

The bucket fixes the size of each tensor. Block tables are ragged: row r's blocks are ``blocks[block_start[r] :
block_start[r + 1]]``, so that one copy of the ids in use fills them, however long the longest possible row is. A
captured program launches from Python only once, so its arguments are checked once. What all recurrent layers share of a
launch's rows is computed once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.device.backend import LayerKV
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.errors import StartupError

CHUNK = 64
"""Tokens of a row that recurrent layers compute together."""


class ItemAttn(NamedTuple):
    """A ragged launch as work items (launches/attention_work_items.py). The bucket's surplus tokens belong to row
    ``rows``.

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
    """``core.device.launch_tensors.CrossAttentionTensors`` as work items (launches/attention_work_items.py).

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


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK_SIZES = (16, 32, 64, 128, 256)
GROUPS = range(1, 17)
HEADS = range(8, 513, 8)
VISION_HEADS = range(16, 129, 8)


def check_supported(head_dim: int, group: int, block_size: int, dtype: torch.dtype, heads: range = HEADS) -> None:
    """Raises StartupError, with what would work, if no kernel supports a model.

    Args:
        head_dim: values of a head.
        group: query heads per KV head on one rank.
        heads: head sizes that the kernels support.
    """
    if head_dim not in heads:
        rule = f"multiples of {heads.step} up to {heads[-1]}"
        raise StartupError(f"heads of {head_dim} values: the cuda kernels take {rule}; --device cpu takes any")
    if group not in GROUPS:
        raise StartupError(f"{group} query heads a KV head: the cuda kernels take 1 to 16; --device cpu takes any")
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise StartupError(f"--block-size {block_size}: the cuda kernels take {sizes}; --device cpu takes any")
    if dtype not in DTYPES:
        raise StartupError(f"{dtype}: the cuda kernels compute in float16, bfloat16 and float32 (--dtype)")


def check_paged(q: Tensor, kv: LayerKV, out: Tensor) -> None:
    """Asserts for text: q and out [tokens, heads, d], k and v [blocks, block_size, kv_heads, d], all of one dtype or k,
    v codes.
    """
    _packed_heads(q)
    k, v = kv.k, kv.v
    assert out.shape == q.shape and out.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert k.shape == v.shape and k.shape[3] == q.shape[2] and q.shape[1] % k.shape[2] == 0
    assert q.dtype == out.dtype and k.dtype == v.dtype and (q.dtype == k.dtype or kv.k_scale is not None)


def check_cross_attention(q: Tensor, k: Tensor, v: Tensor, items: CrossAttentionItems, out: Tensor) -> None:
    """Asserts for cross-attention: q and out [tokens, heads, d]; k and v [rows, KV heads x d].

    k and v are columns of one arena whose rows begin on 16 bytes.
    """
    _packed_heads(q)
    tokens, heads, d = q.shape
    assert out.shape == q.shape and out.is_contiguous() and q.dtype == out.dtype == k.dtype == v.dtype
    assert k.shape == v.shape and k.shape[1] % d == 0 and heads % (k.shape[1] // d) == 0
    for t in (k, v):
        assert t.stride() == (k.stride(0), 1)
        assert not any(n * t.itemsize % 16 for n in (t.storage_offset(), t.stride(0)))
    assert items.reach.shape == items.times.shape == (tokens, items.unit_row.shape[0])
    assert items.reach.is_contiguous() and items.times.is_contiguous()


def check_packed(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Asserts for vision: q, k, v and out [slots, heads, d] of one dtype; slots in steps of 64."""
    for t in (q, k, v, out):
        _packed_heads(t)
        assert t.shape == q.shape and t.dtype == q.dtype
    assert q.shape[0] % 64 == 0


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Asserts for rotary: q and out [tokens, heads, d], k [tokens, kv_heads, d], cos and sin float32 [tokens, d]."""
    for t in (q, k, out):
        _packed_heads(t)
    assert out.shape == q.shape and k.shape[0] == q.shape[0] and k.shape[2] == q.shape[2]
    for t in (cos, sin):
        assert t.shape == (q.shape[0], q.shape[2]) and t.is_contiguous() and t.dtype == torch.float32


def _packed_heads(t: Tensor) -> None:
    assert t.dtype in DTYPES and t.shape[2] in HEADS
    assert t.stride(2) == 1 and t.stride(1) == t.shape[2]


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
