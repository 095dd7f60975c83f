from __future__ import annotations

from typing import Any

import torch


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        data_in: Any,
        gamma: Any,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> Any:
        assert data_in.dim() >= 3, "its users give it three dimensions"
        wide = data_in.float()
        return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(data_in.dtype)
