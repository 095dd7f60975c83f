"""A stand-in of flashinfer 0.6 whose wrappers keep the rules of captured graphs.

Rules: flashinfer/prefill.py and flashinfer/decode.py, and what a plan needs of its workspaces, from
include/flashinfer/attention/scheduler.cuh (``PrefillPlan``, and ``PrefillSM90Plan`` of the kernels that "auto" picks on
Hopper, which cut no keys). A kernel reads the plan from the workspace of integers
when it runs: a plan of another launch that lies there is found out.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.fakes.attention.paged import KernelFault, attended, capturing, offered

PROCESSORS = 132


def _signature(*tensors: Tensor) -> int:
    found = 7
    for value in torch.cat([t.flatten().long() for t in tensors]).tolist():
        found = (found * 1_000_003 + value + 1) % (1 << 61)
    return found


def _read(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, pages: Tensor, indices: Tensor, last: Tensor, ints: Tensor,
    scale: float, shape: int,
) -> Tensor:  # fmt: skip
    """The kernel: ``shape`` is what the host told of the plan, which a graph keeps."""
    planned, of_shape = ints[:16].view(torch.int64).tolist()
    if planned != _signature(starts, pages, last) or of_shape != shape:
        raise KernelFault("the plan in the workspace is not that of this launch")
    held = pages.diff()
    keys = (held - 1).clamp(min=0) * k.shape[1] + last
    table = [indices[a:b] for a, b in pairwise(pages.tolist())]
    return attended(q, k, v, starts, keys.int(), table, scale, 0)


_KERNEL = offered(
    "infer(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor pages, Tensor indices, Tensor last, Tensor ints, "
    "float scale, int shape) -> Tensor",
    _read,
)


class Wrapper:
    """What both wrappers share."""

    plans: ClassVar[int] = 0
    blocking: ClassVar[int] = 0
    """Plans, and copies for which a plan waited."""
    hopper: ClassVar[bool] = False
    backends: ClassVar[set[str]] = set()
    """Kernels that were planned."""
    backend = "fa2"

    def _begin(self, floats: Tensor, layout: str, graph: bool, *buffers: Tensor | None) -> None:
        self._aligned(floats)
        assert layout == "NHD" and graph, "these rules are those of graphs"
        for buffer in buffers:
            if not torch.is_tensor(buffer):
                raise ValueError("a fixed buffer should be a torch.Tensor in CUDA graph mode")
            assert buffer.dtype == torch.int32
        assert not capturing(), "a wrapper's workspace would lie in the pool of a graph"
        self._floats, self._most = floats, 0
        self._ints = torch.empty(8 << 20, dtype=torch.uint8)
        self._page_locked = torch.empty(0, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._aligned(float_workspace_buffer)
        self._aligned(int_workspace_buffer)
        self._floats, self._ints = float_workspace_buffer, int_workspace_buffer
        self._page_locked = torch.empty(int_workspace_buffer.shape, dtype=torch.uint8)

    @staticmethod
    def _aligned(buffer: Tensor) -> None:
        if buffer.data_ptr() % 16:
            raise ValueError("workspace must be 16-byte aligned")

    def _filled(
        self, fixed: tuple[Tensor, ...], given: tuple[Tensor, ...], indices_buf: Tensor, indices: Tensor
    ) -> None:
        """The copies of a plan: from page-locked memory, and none for indices that lie in their buffer."""
        Wrapper.plans += 1
        if capturing():
            raise RuntimeError("plan cannot be used in Cuda Graph")
        if len(indices) > len(indices_buf):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
        for buffer, values in zip(fixed, given, strict=True):
            assert values.dtype == torch.int32 and values.data_ptr() != buffer.data_ptr(), "host arrays of int32"
            if values.shape != buffer.shape:
                raise ValueError(
                    "The batch size should be fixed during the lifecycle of the wrapper in cuda graph mode"
                )
            buffer.copy_(values)
        if len(indices) and indices.data_ptr() != indices_buf.data_ptr():
            Wrapper.blocking += 1
            indices_buf[: len(indices)].copy_(indices)

    def _planned(
        self, starts: Tensor, pages: Tensor, last: Tensor, heads: int, kv_heads: int, d: int, page: int, dtype: Any,
        whole: bool,
    ) -> None:  # fmt: skip
        """Sizes as the scheduler bounds them, and the plan in the workspace."""
        if self.backend == "auto":
            self.backend = "fa3" if self.hopper else "fa2"
        Wrapper.backends.add(self.backend)
        assert dtype in (torch.float16, torch.bfloat16) and d in (64, 128, 256) and heads % kv_heads == 0
        held = pages.diff()
        assert bool(((last >= 1) & (last <= page) | (held == 0) & (last == 0)).all()), "1 <= last_page_len <= page_size"
        total, batch, group = int(starts[-1]), len(last), heads // kv_heads
        self._most = self._most or total
        if total > self._most:
            raise ValueError("The total number of rows in qo_indptr in cuda graph mode cannot exceed the first one's")
        longest = (self._most - batch + 1) % (1 << 32) * group
        tile = 128 if longest > 64 and d < 256 else 64 if longest > 16 else 16
        tiles = max(2 * PROCESSORS // kv_heads, -(-self._most * group // tile) + batch - 1)
        floats = 0 if whole else heads * tiles * tile * (d + 1) * 4
        ints = 4 * (3 * tiles + batch + 2) + (0 if whole else 4 * (self._most + 1) + tiles)
        if self.backend == "fa3":
            works = (-(-self._most // 128) + batch - 1) * heads
            floats, ints, tiles = 0, 4 * (8 * works + PROCESSORS + 1), works
        if floats > self._floats.numel() or ints > self._ints.numel():
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
        self._sizes = heads, kv_heads, d, page
        self._dtype, self._total, self._shape = dtype, total, tiles * 1024 + tile + whole
        at = self._page_locked[:16].view(torch.int64)
        at[0], at[1] = _signature(starts, pages, last), self._shape
        self._ints[:16].copy_(self._page_locked[:16])

    def _run(
        self, q: Tensor, cache: tuple[Tensor, Tensor], scale: float, starts: Tensor, pages: Tensor, indices: Tensor,
        last: Tensor,
    ) -> Tensor:  # fmt: skip
        k, v = cache
        heads, kv_heads, d, page = self._sizes
        if q.shape[0] != self._total:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._total})")
        assert q.dtype == k.dtype == v.dtype == self._dtype and q.shape[1:] == (heads, d)
        assert k.shape[1:] == (page, kv_heads, d) and k.stride() == v.stride() and k.stride(-1) == q.stride(-1) == 1
        return _KERNEL(q, k, v, starts, pages, indices, last, self._ints, scale, self._shape)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert backend in ("auto", "fa2", "fa3")
        if backend != "fa2" and not hasattr(self, "workspace_size"):
            raise MemoryError("64 MiB of key offsets for each wrapper")
        self.backend = backend
        self._fixed = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph, *self._fixed, paged_kv_indices_buf)
        self._indices = paged_kv_indices_buf
        if len(paged_kv_last_page_len_buf) != len(qo_indptr_buf) - 1:
            raise ValueError("The length of paged_kv_last_page_len_buf should be batch_size.")

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, q_data_type: Any = "float16", kv_data_type: Any = None,
        non_blocking: bool = True, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        assert causal and window_left == -1 and kv_data_type == q_data_type and sm_scale == 1
        given = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        self._filled(self._fixed, given, self._indices, paged_kv_indices)
        self._planned(*given, num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, disable_split_kv)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float = 1.0) -> Tensor:
        starts, pages, last = self._fixed
        return self._run(q, paged_kv_cache, k_scale, starts, pages, self._indices, last)


class NewerPrefill(BatchPrefillWithPagedKVCacheWrapper):
    """A version whose kernels for Hopper read page ids as they are."""

    def workspace_size(self) -> tuple[int, int]:
        raise NotImplementedError


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None, backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert use_tensor_cores, "the group sizes of CUDA cores are few"
        assert backend == "fa2", "the others cut no keys"
        self._fixed = paged_kv_indptr_buffer, paged_kv_last_page_len_buffer
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph, *self._fixed, paged_kv_indices_buffer)
        self._indices = paged_kv_indices_buffer
        self._starts = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, sm_scale: float | None = None, window_left: int = -1,
        q_data_type: Any = "float16", kv_data_type: Any = None, non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        assert window_left == -1 and kv_data_type == q_data_type and sm_scale == 1
        self._filled(self._fixed, (indptr, last_page_len), self._indices, indices)
        self._planned(self._starts, indptr, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type,
                      disable_split_kv)  # fmt: skip

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float = 1.0) -> Tensor:
        pages, last = self._fixed
        return self._run(q, paged_kv_cache, k_scale, self._starts, pages, self._indices, last)


def install(patch: pytest.MonkeyPatch, hopper: bool = False, newer: bool = True) -> None:
    """``import flashinfer`` finds these; ``newer``: a version with ``workspace_size``."""
    module: Any = ModuleType("flashinfer")
    module.__version__ = "0.6.18"
    module.BatchPrefillWithPagedKVCacheWrapper = NewerPrefill if newer else BatchPrefillWithPagedKVCacheWrapper
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    patch.setitem(sys.modules, "flashinfer", module)
    patch.setattr(Wrapper, "plans", 0)
    patch.setattr(Wrapper, "blocking", 0)
    patch.setattr(Wrapper, "hopper", hopper)
    patch.setattr(Wrapper, "backends", set())
