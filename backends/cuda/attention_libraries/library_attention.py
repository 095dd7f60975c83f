"""Attention over the paged cache by FlashAttention and by FlashInfer, for the launches of one bucket.

FlashAttention is version 2 by ``flash_attn_varlen_func`` or torch's ``varlen_attn``, 3 by ``flash_attn_with_kvcache``.
All take ragged queries and a rectangle of block ids, which is made on the device once per launch, within its graph. Two
rules determine its form. The longest query row and the longest key row are host numbers, so they are those of the
bucket. And if that is one query per row, version 2 reads row r of the launch as token r: a decoding launch has as many
rows as tokens, and rows of no sequence have no keys, for which both give 0. Version 2 has ``flash_attn_with_kvcache``
too; it reads the longest row from the device, which no capture allows. torch's ``varlen_attn_out`` is not used: with
one query per row it returns the results in a copy and leaves its argument as it was (flash_attn/flash_api.cpp,
``mha_varlen_fwd``).

FlashInfer has a wrapper for each bucket, planned on the host along with the copy of its inputs. A wrapper that graphs
hold works in fixed buffers and for a fixed number of rows. Its plan writes page-locked memory and queues a copy of it,
so that memory is written again only when that copy has run, and the copy itself waits for the launch that still reads
the previous plan, as with all inputs of a stage (``launches.input_buffers.StageBuffer``). Nothing is planned within a
graph. Rows of no sequence have no pages, and give 0. Wrappers of a stage share the memory of partial results and of
plans. DECODE has the kernels of FlashAttention 2, which cut keys; prompts have those that FlashInfer picks: on Hopper
version 3, whose plan takes no partial results. The scale is known when a layer attends, not when the launch is planned:
it is passed as the factor of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cuda.attention_libraries.attention_library_selector import has_bounded_fa3
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes
from trencadis.backends.cuda.launches.input_buffers import InputBuffers, StageBuffer
from trencadis.backends.cuda.runtime_protocol import Runtime, Stream
from trencadis.backends.cuda.shape_policy import align_up, plan_bytes, rows_of
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.device.backend import LayerKV
from trencadis.core.kv_cache_format import ZERO_BLOCK

Array = NDArray[Any]


class LibraryLaunch(Protocol):
    """The launches of one bucket of text."""

    plans: bool
    """True if ``plan`` must run for each launch."""

    def plan(self, arrays: Mapping[str, Array]) -> None:
        """Plans the next launch from its host arrays, by name, along with the copy of its inputs; never within a
        graph.
        """
        ...

    def begin(self, attn: ItemAttn) -> None:
        """Computes what all layers share, at the start of the body and in its graph."""
        ...

    def attend(self, q: Tensor, kv: LayerKV, scale: float, window: int) -> Tensor:
        """Computes attention [n, h, d]; surplus tokens get 0."""
        ...


class FlashAttnRows(NamedTuple):
    """Rows of a launch; the row of its surplus tokens, and rows of no sequence, have no keys."""

    starts: Tensor  # int32 [rows + 1] start of each row's queries
    keys: Tensor  # int32 [rows] number of keys that each row sees
    ends: Tensor  # int32 [rows + 1] the sums of keys before each row
    table: Tensor  # int32 [rows, blocks of the longest row]


def flash_rows(attn: ItemAttn, columns: int, single: bool) -> FlashAttnRows:
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
    """Implements ``LibraryLaunch`` by FlashAttention.

    Args:
        call: the library's function.
        kind: that of ``SelectedLibrary``.
    """

    plans = False

    def __init__(self, call: Callable[..., Any], kind: str, bucket: Bucket, sizes: Sizes) -> None:
        self._call, self._kind, self._columns = call, kind, sizes.row_blocks
        self._single = bucket.stage is Stage.DECODE
        self._queries = 1 if self._single else padded_tokens(bucket)
        self._keys = sizes.row_blocks * sizes.block_size
        self._rows: FlashAttnRows | None = None

    def plan(self, arrays: Mapping[str, Array]) -> None:
        """Does nothing: FlashAttention needs no plan."""

    def begin(self, attn: ItemAttn) -> None:
        self._rows = flash_rows(attn, self._columns, self._single)

    def attend(self, q: Tensor, kv: LayerKV, scale: float, window: int) -> Tensor:
        rows = self._rows
        assert rows is not None, "a launch begins before its layers"
        if self._kind == "torch":
            return self._attend_by_torch(q, kv, scale, window, rows)
        shared: dict[str, Any] = {
            "softmax_scale": scale, "causal": True, "window_size": (window - 1, 0) if window else (-1, -1),
        }  # fmt: skip
        if self._kind == "flash3":
            out: Tensor = self._call(
                q, kv.k, kv.v, cache_seqlens=rows.keys, page_table=rows.table, cu_seqlens_q=rows.starts,
                max_seqlen_q=self._queries, **shared,
            )  # fmt: skip
            return out
        out = self._call(
            q, kv.k, kv.v, rows.starts, rows.ends, self._queries, self._keys, block_table=rows.table, **shared
        )
        return out

    def _attend_by_torch(self, q: Tensor, kv: LayerKV, scale: float, window: int, rows: FlashAttnRows) -> Tensor:
        """A window that ends at the query is what makes torch's attention causal. One query per row sees no later key
        anyway, and only without a window do the heads of a group share what they read.
        """
        sees = (window - 1, 0) if window else (-1, -1) if self._single else (-1, 0)
        out: Tensor = self._call(
            q, kv.k, kv.v, rows.starts, rows.ends, self._queries, self._keys, scale=scale, window_size=sees,
            enable_gqa=True, seqused_k=rows.keys, block_table=rows.table,
        )  # fmt: skip
        return out


LEAST = 256
"""Bytes of the smallest buffer: a wrapper needs one for partial results even if there are none."""


class FlashInferWorkspace:
    """The memory that the plans of one stage share.

    Args:
        floats, ints: bytes of partial results and of a plan.
    """

    def __init__(self, floats: int, ints: int, runtime: Runtime) -> None:
        self.floats, self.ints = runtime.buffer(max(align_up(floats), LEAST)), runtime.buffer(ints)

    def holds(self, floats: int, ints: int) -> bool:
        return self.floats.numel() >= floats and self.ints.numel() >= ints


class FlashInferWorkspaces:
    """One workspace for each input buffer that buckets share, because the buffer's events also order copies to it.

    It is as large as its first bucket needs; a bucket that needs more gets its own.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._shared: dict[StageBuffer, FlashInferWorkspace] = {}

    def of(self, inputs: StageBuffer, floats: int, ints: int) -> FlashInferWorkspace:
        if inputs not in self._shared:
            self._shared[inputs] = FlashInferWorkspace(floats, ints, self._runtime)
        workspace = self._shared[inputs]
        return workspace if workspace.holds(floats, ints) else FlashInferWorkspace(floats, ints, self._runtime)


class FlashInferLaunch:
    """Implements ``LibraryLaunch`` by FlashInfer.

    Args:
        calls: the wrapper classes ``prefill`` and ``decode``.
        buffers: input buffers of the bucket; its block ids are the pages of all rows in order.
        head_dim: values of a head; ``dtype``: of queries and cache.
    """

    plans = True

    def __init__(
        self, calls: Mapping[str, Callable[..., Any]], buffers: InputBuffers, runtime: Runtime,
        workspaces: FlashInferWorkspaces,
        head_dim: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        bucket, sizes = buffers.bucket, buffers.sizes
        self._sizes, self._runtime = sizes, runtime
        self._blocks: Tensor = buffers.tensors.attn.blocks
        self._head_dim, self._dtype = head_dim, dtype
        self._single, self._count = bucket.stage is Stage.DECODE, rows_of(bucket)
        floats, ints = plan_bytes(bucket, sizes.group, sizes.kv_heads, head_dim, sizes.processors)
        self._whole = floats == 0
        workspace = workspaces.of(buffers.buffer, floats, ints)
        lengths = self._count + 1, self._count + 1, self._count
        self._indptrs = [runtime.buffer(4 * n).view(torch.int32) for n in lengths]
        self._host = [runtime.allocate_pinned((n,), torch.int32) for n in lengths]
        self._copied = runtime.event()
        # the first plan must wait for the zeros of its buffers
        runtime.record(buffers.buffer.last_read, Stream.PROGRAMS)
        self._wrapper = self._make_wrapper(calls, workspace, ints)
        self._written = [*self._indptrs, workspace.ints[:ints]]

    def _make_wrapper(self, calls: Mapping[str, Callable[..., Any]], workspace: FlashInferWorkspace, ints: int) -> Any:
        starts, pages, last = self._indptrs
        if self._single:
            made = calls["decode"](
                workspace.floats, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=pages,
                paged_kv_indices_buffer=self._blocks, paged_kv_last_page_len_buffer=last, backend="fa2",
            )  # fmt: skip
        else:
            kernels = calls["prefill"]
            made = kernels(
                workspace.floats, "NHD", use_cuda_graph=True, qo_indptr_buf=starts, paged_kv_indptr_buf=pages,
                paged_kv_indices_buf=self._blocks, paged_kv_last_page_len_buf=last,
                backend="auto" if has_bounded_fa3(kernels) else "fa2",
            )  # fmt: skip
        made.reset_workspace_buffer(workspace.floats, workspace.ints[:ints])
        return made

    def plan(self, arrays: Mapping[str, Array]) -> None:
        self._runtime.host_wait(self._copied)
        count = self._count
        starts = arrays["row_start"][: count + 1]
        pages = arrays["block_start"][: count + 1]
        held = np.diff(pages)
        keys = arrays["context"][:count] + np.diff(starts)
        last = np.where(held > 0, keys - (held - 1) * self._sizes.block_size, 0)
        for area, values in zip(self._host, (starts, pages, last), strict=True):
            self._runtime.write(area)[...] = values
        self._runtime.on_uploads(self._plan, self._written)
        self._runtime.record(self._copied, Stream.UPLOADS)

    def _plan(self) -> None:
        starts, pages, last = self._host
        sizes = self._sizes
        used = self._blocks[: int(pages[-1])]
        shared: dict[str, Any] = {
            "q_data_type": self._dtype, "kv_data_type": self._dtype, "sm_scale": 1.0, "non_blocking": True,
            "disable_split_kv": self._whole,
        }  # fmt: skip
        heads = sizes.group * sizes.kv_heads, sizes.kv_heads, self._head_dim, sizes.block_size
        if self._single:
            self._wrapper.plan(pages, used, last, *heads, **shared)
        else:
            self._wrapper.plan(starts, pages, used, last, *heads, causal=True, **shared)

    def begin(self, attn: ItemAttn) -> None:
        """Does nothing: rows are planned before the launch."""

    def attend(self, q: Tensor, kv: LayerKV, scale: float, window: int) -> Tensor:
        out: Tensor = self._wrapper.run(q, (kv.k, kv.v), k_scale=scale)
        return out
