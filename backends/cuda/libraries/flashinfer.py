"""FlashInfer over the paged cache: a wrapper for each bucket, planned on the host along with the copy of its inputs.

A wrapper that graphs hold works in fixed buffers and for a fixed number of rows. Its plan writes page-locked memory and
queues a copy of it, so that memory is written again only when that copy has run, and the copy itself waits for the
launch that still reads the previous plan, as with all inputs of a stage (``launches.input_buffers.StageBuffer``).
Nothing is planned within a graph. Rows of no sequence have no pages, and give 0.

Wrappers of a stage share the memory of partial results and of plans. The scale is known when a layer attends, not when
the launch is planned: it is passed as the factor of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.attention_tensors import ItemAttn
from trencadis.backends.cuda.launches.input_buffers import InputBuffers, StageBuffer
from trencadis.backends.cuda.libraries.library_launch import Array
from trencadis.backends.cuda.libraries.workspace_sizes import align_up, plan_bytes, rows_of
from trencadis.backends.cuda.runtime_protocol import Runtime, Stream
from trencadis.core.buckets import Stage
from trencadis.core.device.backend import LayerKV

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
            made = calls["prefill"](
                workspace.floats, "NHD", use_cuda_graph=True, qo_indptr_buf=starts, paged_kv_indptr_buf=pages,
                paged_kv_indices_buf=self._blocks, paged_kv_last_page_len_buf=last, backend="fa2",
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
