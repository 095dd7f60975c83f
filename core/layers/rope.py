"""Rotary frequencies: plain, scaled (linear, Llama-3), and M-RoPE as an axis number per frequency."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.rope_config import LinearScaling, RopeScaling


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """float32 [head_dim / 2]: theta ** (-2i / head_dim)."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def scale_llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama-3 scaling of float32 [head_dim / 2]: long wavelengths are divided by ``factor``, short ones stay, those
    between are blended linearly."""
    wavelength = 2 * math.pi / inv_freq
    turns = scaling.original_max_position / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / scaling.factor + keep * inv_freq


def text_frequencies(c: TextConfig) -> tuple[Tensor, Tensor]:
    """(inv_freq float32 [head_dim / 2], axis int64 [head_dim / 2]): angle f is positions[axis[f]] * inv_freq[f]."""
    inv_freq = inverse_frequencies(c.head_dim, c.rope_theta)
    if isinstance(c.rope_scaling, LinearScaling):
        inv_freq = inv_freq / c.rope_scaling.factor
    elif c.rope_scaling is not None:
        inv_freq = scale_llama3(inv_freq, c.rope_scaling)
    axis = torch.zeros(c.head_dim // 2, dtype=torch.int64)
    if c.mrope_section is not None:
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(c.mrope_section))
    return inv_freq, axis


def vision_frequencies(head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """As ``text_frequencies`` for positions (row, column): one half turns by the row, the other by the column."""
    inv_freq = inverse_frequencies(head_dim // 2, theta)
    return inv_freq.repeat(2), torch.arange(2).repeat_interleave(head_dim // 4)
