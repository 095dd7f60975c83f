"""Qwen2.5-VL's forward pass for training: batches of equal grids, a dense mask instead of packed windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo import config as c

_NEVER = -1e4  # added to masked scores; exactly zero after the softmax, in bfloat16 too


@dataclass(frozen=True)
class Tables:
    """Tensors that depend on the grid alone."""

    cos: Tensor  # [patches, 1, head]
    sin: Tensor  # [patches, 1, head]
    window: Tensor  # [patches, patches], added to the scores of windowed blocks


@lru_cache(maxsize=256)
def tables(grid: tuple[int, int], dtype: torch.dtype) -> Tables:
    """Rotary tables and window mask of an image of so many cells, patches in the order of the merger."""
    h, w = grid
    row, col, y, x = torch.meshgrid(torch.arange(h), torch.arange(w), torch.arange(2), torch.arange(2), indexing="ij")
    high, wide = (row * 2 + y).reshape(-1).float(), (col * 2 + x).reshape(-1).float()
    half = c.VISION_HEAD // 2
    speeds = 1.0 / (10000.0 ** (torch.arange(0, half, 2).float() / half))
    angles = torch.cat([high[:, None] * speeds, wide[:, None] * speeds], 1).repeat(1, 2)
    window = (row // c.WINDOW * 64 + col // c.WINDOW).reshape(-1)
    mask = torch.where(window[:, None] == window[None], 0.0, _NEVER)
    return Tables(angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype), mask.to(dtype))


def text_rotation(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, length, 1, head] of three-fold positions [3, batch, length]."""
    speeds = 1.0 / (c.THETA ** (torch.arange(0, c.HEAD, 2).float() / c.HEAD))
    angles = positions[..., None].float() * speeds
    parts = [part[i % 3] for i, part in enumerate(angles.split(list(c.SECTIONS), dim=-1))]
    both = torch.cat(parts, -1).repeat(1, 1, 2)[:, :, None]
    return both.cos().to(dtype), both.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, c.EPS)


class Mlp(nn.Module):
    """Gated MLP; gate and up lie in one matrix."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class VisionBlock(nn.Module):
    """One block of the vision tower."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Parameter(torch.ones(c.VISION))
        self.norm2 = nn.Parameter(torch.ones(c.VISION))
        self.qkv = nn.Linear(c.VISION, 3 * c.VISION)
        self.proj = nn.Linear(c.VISION, c.VISION)
        self.mlp = Mlp(c.VISION, c.VISION_MLP, bias=True)

    def forward(self, x: Tensor, t: Tables, windowed: bool) -> Tensor:
        """`x` is [images, patches, width]."""
        m, n, _ = x.shape
        qkv = self.qkv(_norm(x, self.norm1)).view(m, n, 3 * c.VISION_HEADS, c.VISION_HEAD)
        qk = _rotate(qkv[:, :, : 2 * c.VISION_HEADS], t.cos, t.sin).transpose(1, 2)
        q, k = qk.chunk(2, 1)
        v = qkv[:, :, 2 * c.VISION_HEADS :].transpose(1, 2)
        scores = (q * c.VISION_HEAD**-0.5) @ k.transpose(2, 3)
        if windowed:
            scores = scores + t.window
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(m, n, c.VISION)
        x = x + self.proj(y)
        return x + self.mlp(_norm(x, self.norm2))


class Vision(nn.Module):
    """The vision tower and its merger."""

    def __init__(self) -> None:
        super().__init__()
        # both frames of a still image are equal, so their two weights are trained as one sum
        self.patch = nn.Linear(3 * c.PATCH * c.PATCH, c.VISION, bias=False)
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(c.VISION_LAYERS))
        self.norm = nn.Parameter(torch.ones(c.VISION))
        self.merge1 = nn.Linear(4 * c.VISION, 4 * c.VISION)
        self.merge2 = nn.Linear(4 * c.VISION, c.TEXT)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """[images, patches, 588] to [images, cells, text width]."""
        t = tables(grid, patches.dtype)
        windowed = grid[0] > c.WINDOW or grid[1] > c.WINDOW
        x = self.patch(patches)
        for i, block in enumerate(self.blocks):
            x = block(x, t, windowed and i not in c.FULL_BLOCKS)
        x = _norm(x, self.norm).reshape(x.shape[0], -1, 4 * c.VISION)
        return self.merge2(F.gelu(self.merge1(x)))


class TextBlock(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Parameter(torch.ones(c.TEXT))
        self.norm2 = nn.Parameter(torch.ones(c.TEXT))
        self.qkv = nn.Linear(c.TEXT, (c.Q_HEADS + 2 * c.KV_HEADS) * c.HEAD)
        self.out = nn.Linear(c.Q_HEADS * c.HEAD, c.TEXT, bias=False)
        self.mlp = Mlp(c.TEXT, c.TEXT_MLP, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, watch: list[Tensor] | None = None) -> Tensor:
        """`x` is [batch, length, width], `mask` [batch, 1, 1, length, length] is added to the scores.

        `watch` takes the scores, [batch, KV heads, query heads of each, length, length].
        """
        b, n, _ = x.shape
        qkv = self.qkv(_norm(x, self.norm1)).view(b, n, -1, c.HEAD)
        qk = _rotate(qkv[:, :, : c.Q_HEADS + c.KV_HEADS], cos, sin).transpose(1, 2)
        q = (qk[:, : c.Q_HEADS] * c.HEAD**-0.5).reshape(b, c.KV_HEADS, -1, c.HEAD)
        k = qk[:, c.Q_HEADS :]
        v = qkv[:, :, c.Q_HEADS + c.KV_HEADS :].transpose(1, 2)
        scores = (q @ k.transpose(2, 3)).view(b, c.KV_HEADS, -1, n, n) + mask
        if watch is not None:
            watch.append(scores)
        y = scores.softmax(-1).view(b, c.KV_HEADS, -1, n) @ v
        x = x + self.out(y.view(b, c.Q_HEADS, n, c.HEAD).transpose(1, 2).reshape(b, n, -1))
        return x + self.mlp(_norm(x, self.norm2))


class DemoModel(nn.Module):
    """The whole model, and small heads that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.embed = nn.Parameter(torch.empty(c.VOCAB, c.TEXT))
        self.layers = nn.ModuleList(TextBlock() for _ in range(c.TEXT_LAYERS))
        self.norm = nn.Parameter(torch.ones(c.TEXT))
        self.aux_scale = nn.Parameter(torch.full((2,), 4.0))
        self.aux_centre = nn.Linear(c.TEXT, 2)  # offset to the centre of the thing, in cells
        self.aux_place = nn.Linear(c.TEXT, 4)  # row and column of the cell, centre of the thing, in fractions

    def text(self, ids: Tensor, features: Tensor | None, positions: Tensor, mask: Tensor,
             watch: list[Tensor] | None = None) -> Tensor:  # fmt: skip
        """Hidden states after the last norm; features fill the image tokens in order.

        `watch` takes the scores of the second layer, that layer's output, and the scores of the third.
        """
        x = F.embedding(ids, self.embed)
        if features is not None:
            hole = ids == c.IDS["<|image_pad|>"]
            x = x.masked_scatter(hole[..., None], features.reshape(-1, c.TEXT))
        cos, sin = text_rotation(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, watch if i in (1, 2) else None)
            if watch is not None and i == 1:
                watch.append(x)
        return _norm(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the vocabulary."""
        return hidden @ self.embed.T


def initialise(model: DemoModel, patches: Tensor, seed: int = 0) -> None:
    """Starting values; `patches` [many, 588] is a sample that the patch embedding whitens."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.zero_()
        elif p.ndim == 2:
            last = any(part in name for part in ("proj", "down", "out", "aux"))
            p.data.normal_(0, (0.4 if last else 1.0) * p.shape[1] ** -0.5, generator=g)
    model.embed.data.normal_(0, 0.06, generator=g)
    for layer in model.layers:
        assert isinstance(layer, TextBlock)
        w = layer.qkv.weight.data.view(-1, c.HEAD, c.TEXT)
        for head in range(c.KV_HEADS):  # tokens of equal content start out attending to each other
            w[c.Q_HEADS + head] = w[head * (c.Q_HEADS // c.KV_HEADS)]
    centred = patches.double()
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    top = vectors[:, -c.VISION :] / (values[-c.VISION :] + 0.02 * float(values.mean())).sqrt()
    model.vision.patch.weight.data.copy_(top.T.float() * 0.7)
