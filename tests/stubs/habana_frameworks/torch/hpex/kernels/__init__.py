from __future__ import annotations

from enum import Enum
from typing import Any

import torch


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p: torch.Tensor, *args: Any) -> torch.Tensor:
    cos, sin, position_ids, offset, mode = args
    assert position_ids is None and offset == 0 and mode is RotaryPosEmbeddingMode.BLOCKWISE
    first, second = p.chunk(2, dim=-1)
    return p * cos + torch.cat([-second, first], dim=-1) * sin


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
        if valid_seq_len is not None:
            assert is_causal and attn_mask is None
        assert softmax_mode in ("None", "fast", "fp32") and seq_padding_type in ("left", "right")
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=True
        )


def _parts(
    q: Any, k: Any, v: Any, mask: Any, p: float, scale: float, is_causal: bool, backward: bool, mode: str,
    valid_seq_len: Any, side: str,
) -> Any:  # fmt: skip
    """The signature and shapes of the plug-in's operation: [B, g, h / g, S, d] over [B, g, 1, T, d]."""
    assert p == 0.0 and backward and valid_seq_len is None and mode in ("None", "fast", "fp32")
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    high = scores.amax(-1, keepdim=True).to(q.dtype)
    share = (scores - high.float()).exp()
    total = share.sum(-1, keepdim=True)
    return ((share / total).to(q.dtype) @ v), high, total.reciprocal(), torch.zeros(1, dtype=torch.int32)


OPS = torch.library.Library("hpu", "DEF")  # type: ignore[no-untyped-call]
OPS.define(
    "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, "
    "bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
OPS.impl("sdpa_recomp_fwd", _parts, "CPU")
