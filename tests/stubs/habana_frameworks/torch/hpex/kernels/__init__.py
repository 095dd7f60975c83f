from __future__ import annotations

import faulthandler
from enum import Enum
from typing import Any

import habana_frameworks.torch.operations  # noqa: F401
import torch


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p: torch.Tensor, *args: Any) -> torch.Tensor:
    cos, sin, position_ids, offset, mode = args
    assert position_ids is None and offset == 0 and mode is RotaryPosEmbeddingMode.BLOCKWISE
    first, second = p.chunk(2, dim=-1)
    return p * cos + torch.cat([-second, first], dim=-1) * sin


is_recompute_FSDPA_enabled = faulthandler.is_enabled
"""Stands for the plug-in's function of that name: a builtin of a C library, which Dynamo cannot trace."""


class FusedSDPA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Any = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        if recompute_mode is None:
            recompute_mode = is_recompute_FSDPA_enabled()
        if valid_seq_len is not None:
            assert is_causal and attn_mask is None
        assert softmax_mode in ("None", "fast", "fp32") and seq_padding_type in ("left", "right")
        assert softmax_mode != "fp32" or q.dtype == torch.bfloat16, "fp32 is supported for BF16 alone"
        assert q.dim() == k.dim() == v.dim() == 4 and (attn_mask is None or attn_mask.dim() == 4)
        assert not is_causal or attn_mask is None
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=True
        )
