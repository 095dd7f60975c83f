"""A stand-in for torch's ``scaled_mm`` with scales of blocks, by the rules that torch and cuBLAS publish for sm_90.

torch 2.13 checks (aten/src/ATen/native/cuda/ScaledBlas.cpp, ``_scaled_block1x128_block128x128``): scales of the left
matrix [M, K / 128] with strides (1, M), of the right one [K / 128 filled up to 4, N / 128] with strides (1, filled up),
N a multiple of 16. cuBLAS ("128-element 1D and 128x128 2D Block Scaling") adds: M and N are multiples of 4, scales
begin on 16 bytes. It reads what lies there by its own layout, so a caller that breaks a rule that torch does not check
gets wrong values. Each planted layout is such a mistake, of a library or of its caller.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PLANTED = (
    "rows of scales one after the other", "columns of blocks without filling", "blocks exchanged", "one scale for all",
    "scales of the next group", "raises",
)  # fmt: skip


class BlockProducts:
    """``scaled_mm`` of a torch that has it; ``planted``: how it is wrong."""

    def __init__(self, planted: str = "") -> None:
        self.planted, self.calls = planted, 0

    def __call__(
        self, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, recipe_a: object, scale_b: Tensor, recipe_b: object,
        *, output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        if self.planted == "raises":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")
        kinds = functional.ScalingType
        (m, k), n = mat_a.shape, mat_b.shape[1]
        groups, filled = k // 128, -(-(k // 128) // 4) * 4
        assert (recipe_a, recipe_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
        assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn and mat_a.is_contiguous() and mat_b.t().is_contiguous()
        assert k % 128 == 0 and m % 4 == 0 and n % 16 == 0, (m, k, n)
        assert scale_a.dtype == scale_b.dtype == torch.float32 and output_dtype in (torch.bfloat16, torch.float16)
        assert scale_a.shape == (m, groups) and scale_a.stride() == (1, m), (scale_a.shape, scale_a.stride())
        assert scale_b.shape == (filled, -(-n // 128)) and scale_b.stride() == (1, filled), (scale_b.shape,)
        assert not any(t.data_ptr() % 16 for t in (mat_a, mat_b, scale_a, scale_b))
        self.calls += 1
        sizes_a, sizes_b = self._read(scale_a, scale_b, groups)
        left = mat_a.float() * sizes_a.repeat_interleave(128, 1)
        right = mat_b.float() * sizes_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
        return (left @ right).to(output_dtype)

    def _read(self, scale_a: Tensor, scale_b: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Returns the scales [m, groups] and [groups, n / 128] as this library sees them in memory."""
        m, blocks = scale_a.shape[0], scale_b.t()  # [n / 128, filled]
        sizes_a, sizes_b = scale_a, scale_b[:groups]
        if self.planted == "rows of scales one after the other":
            sizes_a = scale_a.t().reshape(m, groups)
        if self.planted == "columns of blocks without filling":
            sizes_b = blocks.flatten()[: groups * len(blocks)].view(len(blocks), groups).t()
        if self.planted == "blocks exchanged":
            sizes_b = sizes_b.flip(1)
        if self.planted == "one scale for all":
            sizes_b = sizes_b[:1, :1].expand_as(sizes_b)
        if self.planted == "scales of the next group":
            sizes_a = scale_a.roll(1, 1)
        return sizes_a, sizes_b
