"""Stand-ins of flash-attn 2 (``flash_attn``), 3 (``flash_attn_interface``) and torch's copy of 2 that refuse what they
refuse.

Rules: csrc/flash_attn/flash_api.cpp (``mha_varlen_fwd``) and hopper/flash_api.cpp (``mha_fwd``) of
Dao-AILab/flash-attention, versions 2.8.4 and 3; torch/nn/attention/varlen.py and ``mha_varlen_fwd`` in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp of torch 2.13.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.attention.paged import KernelFault, attended, offered

Window = tuple[int, int]


def check(holds: bool, said: str) -> None:
    """TORCH_CHECK."""
    if not holds:
        raise RuntimeError(said)


def _common(q: Tensor, k: Tensor, v: Tensor, table: Tensor, starts: Tensor, window: Window) -> None:
    check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype == v.dtype, "query, key and value must have the same dtype")
    check({q.device, k.device, v.device, table.device, starts.device} == {q.device}, "tensors must be on one device")
    check(all(t.stride(-1) == 1 for t in (q, k, v, table)), "Input tensor must have contiguous last dimension")
    check(table.dtype == torch.int32 and starts.dtype == torch.int32, "must have dtype int32")
    check(starts.is_contiguous(), "cu_seqlens_q must be contiguous")
    heads, d = q.shape[1:]
    check(d <= 256 and d % 8 == 0, "head_size must be a multiple of 8, at most 256")
    check(heads % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(
        k.shape == v.shape and k.shape[3] == d,
        "k must have shape (num_blocks, page_block_size, num_heads_k, head_size)",
    )
    check(table.shape[0] == len(starts) - 1, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
    check(isinstance(window, tuple) and len(window) == 2 and all(type(n) is int for n in window), "window_size")


def _read(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, table: Tensor, scale: float, window: int,
    longest: int, most: int,
) -> Tensor:  # fmt: skip
    """The kernel: blocks of queries beyond ``longest`` are not launched."""
    counts = starts.diff()
    if int(counts.max()) > longest or int(keys.max()) > most:
        raise KernelFault(f"rows of {int(counts.max())} queries and {int(keys.max())} keys, told {longest} and {most}")
    return attended(q, k, v, starts, keys, list(table), scale, window)


_KERNEL = offered(
    "flash(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor keys, Tensor table, float scale, int window, "
    "int longest, int most) -> Tensor",
    _read,
)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert block_table is not None and causal and softmax_scale and not (dropout_p or softcap or alibi_slopes)
    _common(q, k, v, block_table, cu_seqlens_q, window_size)
    check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    check(cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k.is_contiguous(), "cu_seqlens_k must have dtype int32")
    check(cu_seqlens_k.shape == cu_seqlens_q.shape, "cu_seqlens_k must have shape (batch_size + 1)")
    check(type(max_seqlen_q) is int and type(max_seqlen_k) is int, "incompatible function arguments")
    left = window_size[0] if window_size[0] < max_seqlen_k else -1
    if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and left < 0:
        check(
            len(q) == len(cu_seqlens_q) - 1, f"shape '[{len(cu_seqlens_q) - 1}, ...]' is invalid for input of {len(q)}"
        )
    return _KERNEL(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, softmax_scale, left + 1, max_seqlen_q,
                   max_seqlen_k)  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Tensor | None = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Tensor:  # fmt: skip
    assert (
        page_table is not None and cu_seqlens_q is not None and cache_seqlens is not None and softmax_scale and causal
    )
    assert k is v is qv is None and not softcap
    _common(q, k_cache, v_cache, page_table, cu_seqlens_q, window_size)
    check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
    assert type(max_seqlen_q) is int
    check(cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous(), "seqused_k must have dtype int32")
    check(len(cache_seqlens) == len(cu_seqlens_q) - 1, "seqused_k must have shape (batch_size)")
    most = page_table.shape[1] * k_cache.shape[1]
    left = window_size[0] if window_size[0] < most - 1 else -1
    return _KERNEL(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, left + 1, max_seqlen_q,
                   most)  # fmt: skip


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: Window = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """torch's, whose window of (-1, 0) is what others call causal; without ``seqused_k`` it would take whole pages."""
    assert block_table is not None and seqused_k is not None and cu_seq_k is not None and scale
    if not enable_gqa and query.shape[1] != key.shape[2]:
        raise ValueError(f"Expect query and key/value to have the same number of heads but got Hq={query.shape[1]}")
    _common(query, key, value, block_table, cu_seq_q, window_size)
    check(key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    check(cu_seq_k.dtype == torch.int32 and cu_seq_k.is_contiguous(), "cu_seqlens_k must have dtype int32")
    check(cu_seq_k.shape == cu_seq_q.shape, "cu_seqlens_k must have shape (batch_size + 1)")
    check(seqused_k.dtype == torch.int32 and seqused_k.is_contiguous(), "seqused_k must have dtype int32")
    check(len(seqused_k) == len(cu_seq_q) - 1, "seqused_k must have shape (batch_size)")
    check(type(max_q) is int and type(max_k) is int, "incompatible function arguments")
    left, right = window_size
    if max_q > 1 and right != 0:
        raise KernelFault("queries see keys behind them")
    if max_q == 1 and query.shape[1] > key.shape[2] and left < 0 and right < 0:
        check(len(query) == len(cu_seq_q) - 1, f"shape '[{len(cu_seq_q) - 1}, ...]' is invalid for {len(query)}")
    left = left if left < max_k else -1
    return _KERNEL(query, key, value, cu_seq_q, seqused_k, block_table, scale, left + 1, max_q, max_k)


def install_torch(patch: pytest.MonkeyPatch) -> None:
    """A torch that was built with FlashAttention, and no package of it."""
    patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    for name in ("flash_attn", "flash_attn_interface", "flash_attn_3.flash_attn_interface"):
        patch.setitem(sys.modules, name, None)


def install(patch: pytest.MonkeyPatch, version: int) -> None:
    """``import flash_attn`` (2) or ``import flash_attn_interface`` (3) finds these."""
    module: Any = ModuleType("flash_attn" if version == 2 else "flash_attn_interface")
    if version == 2:
        module.__version__, module.flash_attn_varlen_func = "2.8.4", flash_attn_varlen_func
    else:
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
    patch.setitem(sys.modules, module.__name__, module)
